"""Checks that all ranks make the same call."""

from __future__ import annotations

import torch

from .. import forms
from ..attention import DEFAULT_TOLERANCES
from ..problem import Problem
from .ring import Ring


def check_same_call(ring: Ring, problem: Problem) -> None:
    """Raises ValueError if ranks were called with different arguments, which could deadlock or mix
    incompatible tensors."""
    form, geometry = problem.form, problem.geometry
    batch, heads = form.tensors[0].shape[:2] if form.tensors else (0, 0)
    settings = {
        f"{name}.shape[{dim}]": size
        for name, x in (("q", problem.q), ("k", problem.k), ("v", problem.v))
        for dim, size in enumerate(x.shape)
    }
    settings |= {
        "dtype": list(DEFAULT_TOLERANCES).index(problem.q.dtype),
        "form of bias": forms.names().index(form.name),
        "batch of bias": batch,
        "number of heads of bias": heads,
        "causal": geometry.causal,
        "window": geometry.window or 0,
        "scale": problem.scale,
        "tolerance": problem.tolerance,
    }
    own = torch.tensor(list(settings.values()), dtype=torch.float64, device=problem.q.device)
    for rank, other in enumerate(ring.gather(own, "shapes")):
        different = [name for name, x in zip(settings, other != own, strict=True) if x]
        if different:
            raise ValueError(
                f"rank {rank} called context_parallel_attention with another"
                f" {', '.join(different)} than rank {ring.rank}; all ranks must pass the same"
            )
