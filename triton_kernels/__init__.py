"""Attention kernels for GPUs, installed as `biased_flash_attn.triton_kernels`: see launch/."""
