"""Attention kernels for GPUs, installed as `biased_flash_attn.triton_kernels`.

There are none yet: CUDA tensors run on the reference backend.
"""
