"""Layers and models with fused attention, whose position scheme is one argument."""

from .attention import BiasedAttention, FusedAttention
from .positions import BASELINES, Positions, positions
from .transformer import CausalLM, Encoder

__all__ = [
    "BASELINES",
    "BiasedAttention",
    "CausalLM",
    "Encoder",
    "FusedAttention",
    "Positions",
    "positions",
]
