"""The benchmark on CPUs: `make bench`."""
