"""The public call: validate, lower the bias, choose a backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import backends, ops, reference
from .forms import Cumulative, Distance, Geometry, Linear
from .validation import (
    check_bias,
    check_derivatives,
    check_form,
    check_options,
    check_tensors,
)

# Below what an output can show.
DEFAULT_TOLERANCES = {
    torch.float64: 2.0**-24,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-12,
    torch.float16: 2.0**-12,
}
# With fewer a plan takes longer than what it saves.
FEWEST_KEYS = 1024
SKIPPING_BACKENDS = ("cpu", "triton")


def biased_flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias=None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention with a position bias, softmax(scale q k^T + bias) v, in O(N) memory.

    The bias is computed inside each tile and never stored; gradients reach q, k, v and the
    bias's own parameters. Query i has the position p = i + Nk - Nq: the last is at the last key.

    Args:
        q: (B, H, Nq, D), float64, float32, bfloat16 or float16; any strides, but the last
            dimension contiguous.
        k: (B, Hkv, Nk, D) with H a multiple of Hkv: query head h reads key head h // (H / Hkv).
        v: (B, Hkv, Nk, Dv).
        bias: a bias of `biased_flash_attn.biases`, or None.
        causal: whether key j is visible only when j <= p.
        window: if given, the number of past keys a query sees, its own included: p - j < window.
        scale: factor of q k^T, 1 / sqrt(D) by default. The bias is added after it, unscaled.
        tolerance: the share of each query's softmax mass, in [0, 1), that may be left out where
            it is proved to be that small: o is off by at most tolerance (max v - min v) in each
            channel, lse by tolerance. None means 2^-24, or 2^-12 for bfloat16 and float16; 0
            computes everything, as "reference" always does.
        return_lse: also return log sum_j exp(scale q k^T + bias), natural logarithm.
        backend: "triton" (GPUs), "cpu" or "reference", which runs or raises; None chooses.

    Returns:
        o (B, H, Nq, Dv) in q's dtype and, if asked, lse (B, H, Nq) in float32, or float64 for
        float64. A query that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what it may be.
        NotImplementedError: forward-mode derivatives (torch.func.jvp) of any backend but
            "reference".

    The tiling is that of Dao, "FlashAttention-2", 2023; each bias names its paper.
    """
    call = prepared(q, k, v, bias, causal, window, scale, tolerance, backend)
    o, lse = attend(call)
    return (o, lse) if return_lse else o


@dataclass(frozen=True)
class Call:
    """A call whose arguments have been checked, completed, and its bias lowered."""

    q: Tensor
    k: Tensor
    v: Tensor
    form: Linear | Distance | Cumulative | None
    geometry: Geometry
    scale: float
    tolerance: float
    backend: str

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors that the operators take."""
        form = self.form
        return self.q, self.k, self.v, form and form.terms, form and form.gain

    def options(self) -> tuple[str, float, bool, int | None]:
        """The arguments of the operators that follow."""
        name = self.form.name if self.form else "none"
        return name, self.scale, self.geometry.causal, self.geometry.window

    def plan(self) -> Tensor | None:
        """Which keys are left out, or None where that is not worth asking."""
        few = self.geometry.n_key < FEWEST_KEYS
        if self.form is None or self.tolerance == 0 or self.backend not in SKIPPING_BACKENDS or few:
            return None
        tensors = (x if x is None else x.detach() for x in self.tensors())
        return ops.plan(*tensors, *self.options(), self.tolerance, self.backend)


def prepared(q, k, v, bias, causal, window, scale, tolerance, backend) -> Call:
    """Refuses what is wrong with the arguments of `biased_flash_attn`."""
    q, k, v = under_autocast(q, k, v)
    check_tensors(q, k, v)
    check_options(causal, window, scale, tolerance, backend)
    backend = backends.choose(q, backend)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tolerance = DEFAULT_TOLERANCES[q.dtype] if tolerance is None else float(tolerance)
    window = None if window is None else min(window, max(1, k.shape[2]))
    geometry = Geometry(q.shape[2], k.shape[2], causal, window)
    form = None
    if bias is not None:
        check_bias(bias, q)
        real = torch.promote_types(q.dtype, torch.float32)
        form = bias.lower(geometry, real, q.device)
        check_form(form, q, geometry)
    return Call(q, k, v, form, geometry, scale, tolerance, backend)


def _reference(call: Call) -> tuple[Tensor, Tensor]:
    """Computes half precision in float32, as the kernels do."""
    q, form, geometry = call.q, call.form, call.geometry
    real = torch.promote_types(q.dtype, torch.float32)
    dense = None if form is None else form.dense(geometry).to(real)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(real) for x in (q, call.k, call.v))
        o, lse = reference.attention(q, k, v, dense, geometry, call.scale)
    return o.to(call.q.dtype), lse


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """o and lse."""
    if call.backend == "reference":
        return _reference(call)
    if not torch.compiler.is_compiling():
        check_derivatives(*call.tensors())
    return ops.forward(*call.tensors(), *call.options(), call.plan(), call.backend)


def under_autocast(q, k, v):
    """q, k and v, cast where autocast is on for q's device."""
    if torch.is_tensor(q) and _autocasts(q.device.type):
        return tuple(_autocast(x) for x in (q, k, v))
    return q, k, v


def _autocasts(device_type):
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _autocast(x):
    if not torch.is_tensor(x) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
