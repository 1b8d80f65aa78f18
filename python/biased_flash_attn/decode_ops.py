"""The operator of decoding: queries against the pages of a cache. See `ops` for the others."""

from __future__ import annotations

import torch

from . import backends
from .sequences import empty_rows

_LIBRARY = torch.library.Library("biased_flash_attn", "FRAGMENT")

# k, v, terms of running sums, and bounds are pages; kv_cache.py has their shapes.
_LIBRARY.define(
    "decode(Tensor q, Tensor k, Tensor v, Tensor block_table, Tensor lengths, Tensor? terms,"
    " Tensor? gain, Tensor?[] bounds, str form, float scale, SymInt? window, float tolerance,"
    " str backend) -> (Tensor, Tensor)"
)

decode = torch.ops.biased_flash_attn.decode.default


def _decode(*arguments):
    *problem, backend = arguments
    return backends.kernels(backend).decode(*problem)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("decode", _decode, _device)


@torch.library.register_fake("biased_flash_attn::decode", lib=_LIBRARY)
def _(q, k, v, *rest):
    o = empty_rows(q, v.shape[3])
    return o, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
