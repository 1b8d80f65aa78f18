"""Checks that all ranks make the same call."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import forms
from ..attention import DEFAULT_TOLERANCES
from ..forms import Form
from .ring import Ring


def check_same_call(
    ring: Ring, q: Tensor, k: Tensor, v: Tensor, form: Form, options: dict[str, float]
) -> None:
    """Raises ValueError if ranks were called with different arguments, which could deadlock or mix
    incompatible tensors."""
    shapes = {
        f"{name}.shape[{dim}]": size
        for name, x in (("q", q), ("k", k), ("v", v))
        for dim, size in enumerate(x.shape)
    }
    batch_and_heads = form.tensors[0].shape[:2] if form.tensors else (0, 0)
    kinds = {
        "dtype": list(DEFAULT_TOLERANCES).index(q.dtype),
        "form of bias": forms.names().index(form.name),
        "batch of bias": batch_and_heads[0],
        "number of heads of bias": batch_and_heads[1],
    }
    settings = shapes | kinds | options
    own = torch.tensor(list(settings.values()), dtype=torch.float64, device=q.device)
    for rank, other in enumerate(ring.gather(own, "shapes")):
        different = [name for name, x in zip(settings, other != own, strict=True) if x]
        if different:
            raise ValueError(
                f"rank {rank} called context_parallel_attention with another"
                f" {', '.join(different)} than rank {ring.rank}; all ranks must pass the same"
            )
