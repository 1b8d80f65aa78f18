"""The public call: validate, lower the bias, choose a backend."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from . import operators
from .autocast import under_autocast, without_autocast
from .backends import registry
from .backends.protocol import ATTENTION
from .forms import Form, Geometry, NoBias
from .keywords import explains_keywords
from .problem import Problem
from .sequences import Sequences
from .tracing import is_mapped
from .validation import (
    as_int,
    check_bias,
    check_derivatives,
    check_form,
    check_mask,
    check_options,
    check_tensors,
)

# Errors that the output dtype cannot represent.
DEFAULT_TOLERANCES = {
    torch.float64: 2.0**-24,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-12,
    torch.float16: 2.0**-12,
}


@explains_keywords()
def biased_flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias=None,
    *,
    key_padding_mask: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention with a bias, softmax(scale q k^T + bias) v, in O(N) memory.

    The bias is computed inside each tile and never stored. Gradients with respect to q, k, v and
    the bias's own parameters are supported. Query i has position p = i + Nk - Nq, so that the last
    query is aligned with the last key.

    Args:
        q: (B, H, Nq, D), float64, float32, bfloat16 or float16; any strides with a contiguous last
            dimension.
        k: (B, Hkv, Nk, D) with H a multiple of Hkv: query head h reads key head h // (H / Hkv).
        v: (B, Hkv, Nk, Dv).
        bias: a bias of `biased_flash_attn.biases`, or None.
        key_padding_mask: (B, Nk) bool, True for tokens and False for padding before or after them.
            Padding is excluded, and its values and steps of a bias are never read. p and distances
            count padding; a bias that depends on p itself, such as FIRE, does not. A query whose
            position is padding or beyond the keys is padding too, with o = 0, lse = -inf and zero
            gradients. With causal=False the mask requires Nq = Nk.
        causal: whether key j is visible only when j <= p.
        window: if given, the number of past keys that a query sees, including the one at its own
            position: p - j < window. An int, or a numpy integer or integer tensor of one element.
        scale: factor of q k^T, 1 / sqrt(D) by default. The bias is added after it, unscaled.
        tolerance: an upper bound, in [0, 1), of the fraction of each query's softmax mass that may
            be skipped. The error of o is at most tolerance (max v - min v) in each channel, that of
            lse at most tolerance. None means 2^-24, or 2^-12 for bfloat16 and float16; 0 computes
            everything, as "reference" always does.
        return_lse: whether to return log sum_j exp(scale q k^T + bias), the natural logarithm, too.
        backend: "cuda" or "triton" (GPUs), "cpu" or "reference"; the call raises an error if the
            backend cannot run it. None selects a backend.

    Returns:
        o (B, H, Nq, Dv) in q's dtype and, with return_lse, lse (B, H, Nq) in float32, or float64
        for float64. A query that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
        NotImplementedError: for forward-mode derivatives (torch.func.jvp), except with the backend
            "reference".

    The tiling follows Dao, "FlashAttention-2", 2023; each bias cites its paper.
    """
    problem = prepared(
        q, k, v, bias, causal, window, scale, tolerance, backend, key_padding_mask=key_padding_mask
    )
    o, lse = attend(problem)
    return (o, lse) if return_lse else o


def attend(problem: Problem) -> tuple[Tensor, Tensor]:
    """o and lse, differentiable with respect to q, k, v and the form's tensors."""
    backend = registry.get(problem.backend)
    # The operators infer the shapes of meta tensors.
    if not backend.has_kernels and not problem.q.is_meta:
        return backend.forward(problem)
    if not torch.compiler.is_compiling():
        check_derivatives(*problem.tensors())
    o, lse, *_ = operators.forward(operators.planned(problem))
    return o, lse


def complete(
    q,
    k,
    v,
    place: Callable[[Tensor, Tensor, Tensor], Geometry],
    lower: Callable[[Tensor, Geometry], Form],
    *,
    causal=True,
    window=None,
    scale=None,
    tolerance=None,
    backend=None,
    call: str = ATTENTION,
) -> Problem:
    """Validates and completes the arguments of a call, of any kind.

    place: the geometry, from q, k and v, which have been validated. lower: the form of the bias,
    from q and the geometry. call: the kind of call, for the choice of a backend.
    """
    q, k, v = under_autocast(q, k, v)
    check_tensors(q, k, v)
    check_options(causal, window, scale, tolerance, backend)
    geometry = place(q, k, v)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tolerance = DEFAULT_TOLERANCES[q.dtype] if tolerance is None else float(tolerance)
    described = partial(Problem, q, k, v, lower(q, geometry), geometry, scale, tolerance)
    return described(registry.choose(backend, described(""), call))


def prepared(
    q,
    k,
    v,
    bias,
    causal,
    window,
    scale,
    tolerance,
    backend,
    *,
    key_padding_mask: Tensor | None = None,
    sequences: Sequences | None = None,
) -> Problem:
    """Validates the arguments of `biased_flash_attn` and returns them as a Problem."""

    window = as_int(window)

    def place(q: Tensor, k: Tensor, v: Tensor) -> Geometry:
        if key_padding_mask is not None:
            given = _sequences_of_mask(key_padding_mask, q, k, causal)
        else:
            given = sequences
        n_query, n_key, shift = q.shape[2], k.shape[2], 0
        if given is not None:
            n_query, n_key, shift = given.longest_query, given.longest_key, given.longest_shift
        needed = None if window is None else min(window, max(1, n_key + shift))
        return Geometry(n_query, n_key, causal, needed, given, shift)

    return complete(
        q,
        k,
        v,
        place,
        partial(lowered, bias),
        causal=causal,
        window=window,
        scale=scale,
        tolerance=tolerance,
        backend=backend,
    )


def _sequences_of_mask(mask: Tensor, q: Tensor, k: Tensor, causal: bool) -> Sequences:
    check_mask(mask, q, k, causal)
    sequences = Sequences.from_mask(mask, q.shape[2])
    unread = torch.compiler.is_compiling() or mask.device.type != "cpu" or is_mapped(mask)
    if not unread and sequences.seems_inverted():
        warnings.warn(
            "key_padding_mask hides all tokens of a sequence; it must be True for tokens, where"
            " that of torch.nn.MultiheadAttention is True for padding: is it inverted?",
            stacklevel=7,
        )
    return sequences


def lowered(bias, q: Tensor, geometry: Geometry) -> Form:
    """The validated form of a bias for a call's q."""
    return lowered_over(bias, q, geometry, lambda form: geometry)


def lowered_over(
    bias, q: Tensor, tokens: Geometry, geometry_of: Callable[[Form], Geometry]
) -> Form:
    """The form of a bias over the geometry that its kind of form requires, given the form over the
    call's own tokens."""
    if bias is None:
        return NoBias()
    check_bias(bias, q)
    real, geometry = torch.promote_types(q.dtype, torch.float32), tokens
    with without_autocast(q.device):
        form = bias.lower(tokens, real, q.device)
        if isinstance(form, Form):
            geometry = geometry_of(form)
        if geometry is not tokens:
            form = bias.lower(geometry, real, q.device)
    check_form(form, q, geometry)
    return form
