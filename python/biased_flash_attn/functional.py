"""The public call: validate, lower the bias, choose a backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import backends, ops, reference
from .forms import Form, Geometry, of_terms
from .parts import parts
from .sequences import Sequences, laid_out_as
from .skipping import FEWEST_KEYS
from .validation import (
    check_bias,
    check_derivatives,
    check_form,
    check_mask,
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
SKIPPING_BACKENDS = ("cpu", "triton")


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
    """Exact attention with a position bias, softmax(scale q k^T + bias) v, in O(N) memory.

    The bias is computed inside each tile and never stored; gradients reach q, k, v and the
    bias's own parameters. Query i has the position p = i + Nk - Nq: the last is at the last key.

    Args:
        q: (B, H, Nq, D), float64, float32, bfloat16 or float16; any strides, but the last
            dimension contiguous.
        k: (B, Hkv, Nk, D) with H a multiple of Hkv: query head h reads key head h // (H / Hkv).
        v: (B, Hkv, Nk, Dv).
        bias: a bias of `biased_flash_attn.biases`, or None.
        key_padding_mask: (B, Nk) bool, True for tokens and False for padding before or after them,
            which has no part in anything: what is stored there is never read, steps of a bias
            included. Nobody moves: p and distances are counted as without it. A query whose own
            position is padding, or lies beyond the keys, is padding too: o = 0, lse = -inf and zero
            gradients. With causal=False it asks for Nq = Nk.
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
    call = prepared(
        q, k, v, bias, causal, window, scale, tolerance, backend, key_padding_mask=key_padding_mask
    )
    o, lse = call.run()
    return (o, lse) if return_lse else o


@dataclass(frozen=True)
class Call:
    """A call whose arguments have been checked, completed, and its bias lowered."""

    q: Tensor
    k: Tensor
    v: Tensor
    form: Form | None
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
        return ops.plan(*tensors, *self.options(), self.tolerance, self.backend, *self.sequences())

    def sequences(self) -> tuple[Tensor, int, int, int] | tuple[()]:
        """The operators' last arguments: where sequences lie, and their largest sizes."""
        sequences = self.geometry.sequences
        if sequences is None:
            return ()
        longest = sequences.longest_query, sequences.longest_key, sequences.longest_shift
        return sequences.rows, *longest

    def run(self) -> tuple[Tensor, Tensor]:
        """o and lse."""
        # The operators give meta tensors their shapes.
        if self.backend == "reference" and not self.q.is_meta:
            return _reference(self)
        if not torch.compiler.is_compiling():
            check_derivatives(*self.tensors())
        return ops.forward(
            *self.tensors(), *self.options(), self.plan(), self.backend, *self.sequences()
        )


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
) -> Call:
    """Refuses what is wrong with the arguments of `biased_flash_attn`."""
    q, k, v = under_autocast(q, k, v)
    check_tensors(q, k, v)
    check_options(causal, window, scale, tolerance, backend)
    backend = backends.choose(q, backend)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tolerance = DEFAULT_TOLERANCES[q.dtype] if tolerance is None else float(tolerance)
    if key_padding_mask is not None:
        check_mask(key_padding_mask, q, k, causal)
        sequences = Sequences.of_mask(key_padding_mask, q.shape[2])
    n_query, n_key, shift = q.shape[2], k.shape[2], 0
    if sequences is not None:
        n_query, n_key = sequences.longest_query, sequences.longest_key
        shift = sequences.longest_shift
    window = None if window is None else min(window, max(1, n_key + shift))
    geometry = Geometry(n_query, n_key, causal, window, sequences, shift)
    form = None
    if bias is not None:
        check_bias(bias, q)
        real = torch.promote_types(q.dtype, torch.float32)
        form = bias.lower(geometry, real, q.device)
        check_form(form, q, geometry)
    return Call(q, k, v, form, geometry, scale, tolerance, backend)


def _reference(call: Call) -> tuple[Tensor, Tensor]:
    """Computes half precision in float32, as the kernels do."""
    sequences, geometry = call.geometry.sequences, call.geometry
    if sequences is None or len(sequences.rows) == 0:
        geometry = Geometry(call.q.shape[2], call.k.shape[2], geometry.causal, geometry.window)
        o, lse = _attend(call, geometry, *call.tensors())
    else:
        each = parts(geometry, *call.tensors(), call.options()[0])
        o, lse = _joined(
            [_attend(call, x.geometry, x.q, x.k, x.v, x.terms, x.gain) for x in each], sequences
        )
    return laid_out_as(call.q, o.to(call.q.dtype)), lse


def _attend(call: Call, geometry: Geometry, q, k, v, terms, gain) -> tuple[Tensor, Tensor]:
    real = torch.promote_types(q.dtype, torch.float32)
    form = of_terms(call.options()[0], terms, gain)
    dense = None if form is None else form.dense(geometry).to(real)
    with torch.autocast(q.device.type, enabled=False):
        return reference.attention(q.to(real), k.to(real), v.to(real), dense, geometry, call.scale)


def _joined(results: list[tuple[Tensor, Tensor]], sequences: Sequences) -> tuple[Tensor, Tensor]:
    """One after the other, or each in its batch entry, where nothing belongs to padding."""
    if sequences.is_packed:
        o, lse = (torch.cat(x, 2) for x in zip(*results, strict=True))
        return o, lse
    padded = []
    for (o, lse), (first, count, *_) in zip(results, sequences.rows.tolist(), strict=True):
        around = (first, sequences.query_rows - first - count)
        padded.append((pad(o, (0, 0, *around)), pad(lse, around, value=-torch.inf)))
    o, lse = (torch.cat(x) for x in zip(*padded, strict=True))
    return o, lse


def under_autocast(q, k, v):
    """q, k and v, cast where autocast is on for q's device."""
    if torch.is_tensor(q) and _autocasts(q.device.type):
        return tuple(_autocast(x) for x in (q, k, v))
    return q, k, v


def _autocasts(device_type):
    # torch.compile of PyTorch 2.11 does not see through torch.amp.is_autocast_available.
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _autocast(x):
    if not torch.is_tensor(x) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
