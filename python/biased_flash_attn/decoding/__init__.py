"""Decoding: attention of new tokens to a cache of keys and values."""
