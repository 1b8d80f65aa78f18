"""The Triton kernels as compiled, for GPUs that need not be present."""
