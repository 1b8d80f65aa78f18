"""Certified skipping: which keys provably carry negligible attention weight."""
