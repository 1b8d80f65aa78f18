"""Attention and its gradients, of whole sequences."""
