"""The public call: validate, lower the bias, choose a backend."""

from __future__ import annotations

import torch
from torch import Tensor

from . import backends, ops, reference
from .forms import Geometry
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
        tolerance: the share of each row's softmax mass, in [0, 1), that may be left out where
            that is proved; None means below what the dtype can show. Today nothing is left out.
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
    if torch.is_tensor(q) and _autocasts(q.device.type):
        q, k, v = (_autocast(x) for x in (q, k, v))
    check_tensors(q, k, v)
    check_options(causal, window, scale, tolerance, backend)
    backend = backends.choose(q, backend)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    window = None if window is None else min(window, max(1, k.shape[2]))
    geometry = Geometry(q.shape[2], k.shape[2], causal, window)
    form = None
    if bias is not None:
        check_bias(bias, q)
        real = torch.promote_types(q.dtype, torch.float32)
        form = bias.lower(geometry, real, q.device)
        check_form(form, q, geometry)
    if backend == "reference":
        o, lse = _reference(q, k, v, form, geometry, scale)
    else:
        if not torch.compiler.is_compiling():
            check_derivatives(q, k, v, form and form.terms, form and form.gain)
        plan = _plan(q, k, v, form, geometry, scale, tolerance, backend)
        o, lse = ops.forward(
            q,
            k,
            v,
            form and form.terms,
            form and form.gain,
            form.name if form else "none",
            scale,
            causal,
            window,
            plan,
            backend,
        )
    return (o, lse) if return_lse else o


def _plan(q, k, v, form, geometry, scale, tolerance, backend) -> Tensor | None:
    """Which keys may be left out, or None where that is not worth asking."""
    if tolerance is None:
        tolerance = DEFAULT_TOLERANCES[q.dtype]
    # The Triton kernels take every visible tile.
    if form is None or tolerance == 0 or backend != "cpu" or geometry.n_key < FEWEST_KEYS:
        return None
    tensors = (x if x is None else x.detach() for x in (q, k, v, form.terms, form.gain))
    options = (form.name, scale, geometry.causal, geometry.window, tolerance, backend)
    return ops.plan(*tensors, *options)


def _reference(q, k, v, form, geometry, scale):
    """Computes half precision in float32, as the kernels do."""
    real = torch.promote_types(q.dtype, torch.float32)
    dense = None if form is None else form.dense(geometry).to(real)
    with torch.autocast(q.device.type, enabled=False):
        o, lse = reference.attention(q.to(real), k.to(real), v.to(real), dense, geometry, scale)
    return o.to(q.dtype), lse


def _autocasts(device_type):
    return torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def _autocast(x):
    if not torch.is_tensor(x) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
