"""What benchmarks on CPUs and GPUs share: what is measured, and how."""
