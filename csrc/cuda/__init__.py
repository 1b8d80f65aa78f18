"""Sources of the CUDA kernels, installed as `biased_flash_attn.cuda_kernels.sources`."""
