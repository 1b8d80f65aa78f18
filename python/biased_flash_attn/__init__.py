"""Fused attention with position biases. See `biased_flash_attn` and `biases`."""

from . import biases
from .attention import biased_flash_attn
from .decoding.call import biased_flash_attn_with_kvcache
from .decoding.kv_cache import KVCache
from .skipping.report import AttentionPlan, attention_plan
from .varlen import biased_flash_attn_varlen

__all__ = [
    "AttentionPlan",
    "KVCache",
    "attention_plan",
    "biased_flash_attn",
    "biased_flash_attn_varlen",
    "biased_flash_attn_with_kvcache",
    "biases",
]
