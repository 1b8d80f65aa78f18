"""Attention of a few queries to the pages of a cache."""
