"""The benchmark on a GPU: `make gpu-bench`."""
