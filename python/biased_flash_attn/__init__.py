"""Fused attention with position biases. See `biased_flash_attn` and `biases`."""

from . import biases
from .functional import biased_flash_attn
from .plan import AttentionPlan, attention_plan
from .varlen import biased_flash_attn_varlen

__all__ = [
    "AttentionPlan",
    "attention_plan",
    "biased_flash_attn",
    "biased_flash_attn_varlen",
    "biases",
]
