"""Fused attention with position biases. See `biased_flash_attn`, `attention_plan` and `biases`."""

from . import biases
from .functional import biased_flash_attn
from .plan import AttentionPlan, attention_plan

__all__ = ["AttentionPlan", "attention_plan", "biased_flash_attn", "biases"]
