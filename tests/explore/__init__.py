"""Runs the tests with fresh seeds, to find failures that the seed of `make test` does not show."""
