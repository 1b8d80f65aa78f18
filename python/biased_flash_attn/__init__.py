"""Exact, fused attention with position biases. See `biased_flash_attn` and the module `biases`."""

from . import biases
from .functional import biased_flash_attn

__all__ = ["biased_flash_attn", "biases"]
