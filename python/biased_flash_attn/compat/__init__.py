"""Functions with the signatures of other packages: flash-attn 2 and PyTorch."""

from .flash_attn import flash_attn_func, flash_attn_varlen_func
from .flash_attn_kvcache import flash_attn_with_kvcache
from .flash_attn_packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .sdpa import scaled_dot_product_attention

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "scaled_dot_product_attention",
]
