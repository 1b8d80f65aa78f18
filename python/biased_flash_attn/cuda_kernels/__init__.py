"""The host side of the CUDA C++ kernels for Hopper (csrc/cuda): NVRTC compiles a kernel at its
first use, a cache keeps it on disk, and the driver launches it."""
