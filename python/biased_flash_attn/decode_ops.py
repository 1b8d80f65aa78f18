"""The operators of decoding, on the pages of a cache. See `ops` for the others."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends, reference
from .sequences import empty_rows

_LIBRARY = torch.library.Library("biased_flash_attn", "FRAGMENT")

# k, v, terms of running sums, and bounds are pages; kv_cache.py has their shapes.
_LIBRARY.define(
    "decode(Tensor q, Tensor k, Tensor v, Tensor block_table, Tensor lengths, Tensor? terms,"
    " Tensor? gain, Tensor?[] bounds, str form, float scale, SymInt? window, float tolerance,"
    " str backend) -> (Tensor, Tensor)"
)

_LIBRARY.define(
    "append(Tensor(a!) pages, Tensor rows, Tensor block_table, Tensor lengths, str backend) -> ()"
)


def decode(*arguments) -> tuple[Tensor, Tensor]:
    """The operator or, where nothing traces it, what it calls: a hundredth of a long step goes to
    dispatching, of a short one a tenth."""
    return _called(torch.ops.biased_flash_attn.decode.default, _decode)(*arguments)


def append(*arguments) -> None:
    """The same of new tokens."""
    _called(torch.ops.biased_flash_attn.append.default, _append)(*arguments)


def _called(operator, implementation):
    return operator if torch.compiler.is_compiling() else implementation


def _decode(*arguments):
    *problem, backend = arguments
    return backends.kernels(backend).decode(*problem)


def _append(*arguments):
    *problem, backend = arguments
    module = reference if backend == "reference" else backends.kernels(backend)
    module.append(*problem)


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("decode", _decode, _device)
    _LIBRARY.impl("append", _append, _device)


@torch.library.register_fake("biased_flash_attn::decode", lib=_LIBRARY)
def _(q, k, v, *rest):
    o = empty_rows(q, v.shape[3])
    return o, q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


@torch.library.register_fake("biased_flash_attn::append", lib=_LIBRARY)
def _(*_):
    pass
