"""Layers and models with fused attention, whose position scheme is one argument."""

from .attention import BiasedAttention, FusedAttention
from .named_biases import BIASES
from .positions import BASELINES, Positions, positions
from .transformer import CausalLM, Encoder

__all__ = [
    "BASELINES",
    "BIASES",
    "BiasedAttention",
    "CausalLM",
    "Encoder",
    "FusedAttention",
    "Positions",
    "positions",
]
