"""Shared by the benchmarks on CPUs and GPUs: implementations, checks and measurements."""
