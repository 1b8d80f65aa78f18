"""The public call of decoding: validate, lower the bias, append, attend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from . import backends, decode_ops, reference
from .biases import CumulativeBias, DistanceBias
from .distance_table import DistanceTable
from .forms import Cumulative, Distance, Geometry, Linear
from .functional import DEFAULT_TOLERANCES, FEWEST_KEYS, Call, under_autocast
from .kv_cache import KVCache
from .validation import check_bias, check_form, check_options, check_tensors, refuse_gradients


def biased_flash_attn_with_kvcache(
    q: Tensor,
    cache: KVCache,
    k: Tensor | None = None,
    v: Tensor | None = None,
    bias=None,
    *,
    scale: float | None = None,
    tolerance: float | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends k and v to a cache, and attends to all that it then holds, causally.

    The last query stands on the last key of its sequence: n queries with n new keys are what
    `biased_flash_attn` gives for the last n queries of the whole sequence. A step takes one new
    token or several. There are no gradients: call it under torch.no_grad().

    Args:
        q: (B, H, Nq, D) in the cache's dtype; H a multiple of the cache's Hkv.
        cache: what the calls before left; this one leaves its own tokens there too. Its window,
            if it has one, is that of the attention.
        k: (B, Hkv, N, D), the keys of N new tokens of each sequence, or None.
        v: (B, Hkv, N, Dv), their values; given with k.
        bias: a bias of `biased_flash_attn.biases`, or None. One that sums steps has those of the N
            new tokens, and gains of the queries: cable(x) with the new tokens' hidden states. The
            table of a function of the distance is kept until the cache is empty again, so that
            the function must not change before.
        scale: factor of q k^T, 1 / sqrt(D) by default.
        tolerance: the share of each query's softmax mass that may be left out, as in
            `biased_flash_attn`; "reference" computes everything.
        return_lse: also return log sum_j exp(scale q k^T + bias), natural logarithm.
        backend: "triton" (GPUs), "cpu" or "reference", which runs or raises; None chooses.

    Returns:
        o (B, H, Nq, Dv) in q's dtype and, if asked, lse (B, H, Nq) in float32, or float64 for
        float64. A query that sees no key has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what it may be. The cache is
            then as it was before.

    Splitting the keys over threads, as where a single query has many, is that of Dao et al.,
    "Flash-Decoding for long-context inference", 2023; each bias names its paper.
    """
    step = _prepared(q, cache, k, v, bias, scale, tolerance, backend)
    cache.reserve(step.k.shape[2])
    results = _first_call(step) if step.is_first else _later_call(step)
    return results if return_lse else results[0]


@dataclass(frozen=True)
class Step:
    """A call whose arguments have been checked and completed.

    form: running sums are those of the new tokens, (B, H, N), from the first token of a sequence
    on. peaks: the largest entries of a table: see DistanceTable.
    """

    q: Tensor
    cache: KVCache
    k: Tensor
    v: Tensor
    form: Linear | Distance | Cumulative | None
    peaks: Tensor | None
    scale: float
    tolerance: float
    backend: str

    @property
    def sums(self) -> Tensor | None:
        return self.form.sums if isinstance(self.form, Cumulative) else None

    @property
    def is_first(self) -> bool:
        """Whether it is an ordinary call: all keys are new, and each has its query."""
        tokens = self.k.shape[2]
        return not any(self.cache.lengths) and 0 < tokens == self.q.shape[2]

    def of(self, tokens: slice, queries: slice) -> Step:
        """The same for some of the new tokens and of the queries."""
        form = self.form
        if isinstance(form, Cumulative):
            gain = None if form.gain is None else form.gain[..., queries]
            form = replace(form, sums=form.sums[..., tokens], gain=gain)
        return replace(
            self,
            q=self.q[:, :, queries],
            k=self.k[:, :, tokens],
            v=self.v[:, :, tokens],
            form=form,
        )


def _prepared(q, cache, k, v, bias, scale, tolerance, backend) -> Step:
    """Refuses what is wrong with the arguments of `biased_flash_attn_with_kvcache`."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a KVCache")
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{given} is given and {missing} is None; tokens have both")
    if k is None:
        q, _, _ = under_autocast(q, q, q)
        check_tensors(q, q, q)
        k, v = (x.new_empty((cache.batch, x.shape[1], 0, x.shape[3])) for x in (cache.k, cache.v))
    else:
        q, k, v = under_autocast(q, k, v)
        check_tensors(q, k, v)
    _check_cache(q, cache, k, v)
    check_options(True, None, scale, tolerance, backend)
    backend = backends.choose(q, backend)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tolerance = DEFAULT_TOLERANCES[q.dtype] if tolerance is None else float(tolerance)
    form = peaks = None
    if bias is not None:
        check_bias(bias, q)
    _check_gradients(q, k, v, bias)
    with torch.no_grad():
        if bias is not None:
            form, peaks = _lowered(bias, q, cache, k.shape[2])
        _check_sums(form, q, cache, k)
        if isinstance(form, Cumulative):
            form = replace(form, sums=_continued(form.sums, q, cache))
    few = max(cache.lengths) + k.shape[2] < FEWEST_KEYS
    tolerance = 0.0 if form is None or few else tolerance
    return Step(q, cache, k, v, form, peaks, scale, tolerance, backend)


def _check_cache(q: Tensor, cache: KVCache, k: Tensor, v: Tensor) -> None:
    """Whether the tensors are of the cache's kind."""
    _, kv_heads, _, head_dim = cache.k.shape
    value_dim = cache.v.shape[3]
    for name, x, heads, dim in (
        ("q", q, None, head_dim),
        ("k", k, kv_heads, head_dim),
        ("v", v, kv_heads, value_dim),
    ):
        if x.dtype != cache.k.dtype:
            raise TypeError(f"{name} is {x.dtype}; the cache holds {cache.k.dtype}")
        if x.device != cache.k.device:
            raise ValueError(f"{name} is on {x.device}; the cache is on {cache.k.device}")
        if x.shape[0] != cache.batch:
            raise ValueError(f"{name} has batch {x.shape[0]}; that of the cache is {cache.batch}")
        if heads is not None and x.shape[1] != heads:
            raise ValueError(f"{name} has {x.shape[1]} heads; the cache has {heads}")
        if x.shape[3] != dim:
            raise ValueError(f"{name} has head_dim {x.shape[3]}; the cache has {dim}")
    if q.shape[1] % kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads; the cache has {kv_heads}, which must divide it"
        )
    most, n_query, tokens = cache.most_tokens, q.shape[2], k.shape[2]
    if most is not None and n_query > max(tokens, most):
        raise ValueError(
            f"q has {n_query} queries; with {tokens} new tokens and window {cache.window} it may"
            f" have {max(tokens, most)}: the keys of older ones are overwritten"
        )


def _check_gradients(q, k, v, bias) -> None:
    refuse_gradients({"q": q, "k": k, "v": v})
    of_bias = bias.parameters() if isinstance(bias, nn.Module) else ()
    if isinstance(bias, CumulativeBias):
        of_bias = (x for x in (bias.steps, bias.gain) if x is not None)
    for x in of_bias:
        refuse_gradients({"bias": x})


def _check_sums(form, q: Tensor, cache: KVCache, k: Tensor) -> None:
    """Whether the bias sums steps as that of the cached tokens does."""
    if not any(cache.lengths):
        return
    if isinstance(form, Cumulative):
        if cache.sums is None:
            raise ValueError(
                "bias sums steps, and the cache holds tokens that were appended without them"
            )
        if cache.sums.shape[1] != q.shape[1]:
            raise ValueError(
                f"q has {q.shape[1]} heads; the cache holds sums of {cache.sums.shape[1]}"
            )
    elif cache.sums is not None and k.shape[2]:
        raise ValueError("bias sums no steps, and the cache holds tokens with sums")


def _lowered(bias, q: Tensor, cache: KVCache, tokens: int):
    """The form of a bias over the keys there will be, and the peaks of its table if it has one."""
    real = torch.promote_types(q.dtype, torch.float32)
    if isinstance(bias, CumulativeBias):
        geometry = Geometry(q.shape[2], tokens)
        form = bias.lower(geometry, real, q.device)
        check_form(form, q, geometry)
        _refuse_nan(form, "steps")
        return form, None
    keys = max(1, max(cache.lengths) + tokens)
    geometry = Geometry(1, keys, True, cache.window)
    if isinstance(bias, DistanceBias):
        if cache.distance_table is None or not cache.distance_table.is_of(bias):
            cache.distance_table = DistanceTable(bias, real, q.device)
        return cache.distance_table.upto(geometry.n_distances)
    form = bias.lower(geometry, real, q.device)
    check_form(form, q, geometry)
    if not isinstance(form, Linear):
        raise TypeError(
            f"bias is a {type(bias).__name__}; in decoding it may be a DistanceBias, a"
            " CumulativeBias, or one that is lowered to slopes"
        )
    if form.slopes is not cache.checked_slopes:
        _refuse_nan(form, "slopes")
        cache.checked_slopes = form.slopes
    return form, None


def _refuse_nan(form, what: str) -> None:
    """As the CPU kernels do of ordinary calls; on GPUs the caller would have to wait for it."""
    for x, name in ((form.terms, what), (form.gain, "gains")):
        if x is not None and x.device.type == "cpu" and x.sum().isnan() and x.isnan().any():
            raise ValueError(f"bias: its {name} contain NaN")


def _continued(sums: Tensor, q: Tensor, cache: KVCache) -> Tensor:
    """Running sums of new tokens, (B or 1, H or 1, N), with all before them; (B, H, N)."""
    sums = sums.expand(*q.shape[:2], -1)
    return sums if not any(cache.lengths) else cache.last_sums[..., None] + sums


def _pieces(step: Step) -> list[Step]:
    """Steps of as many tokens as a sliding cache can take at once; else the step itself."""
    most, tokens, n_query = step.cache.most_tokens, step.k.shape[2], step.q.shape[2]
    if most is None or tokens <= most:
        return [step]
    before = tokens - n_query  # new tokens that have no query
    ends = [*range(most, tokens, most), tokens]
    return [
        step.of(slice(first, end), slice(max(0, first - before), max(0, end - before)))
        for first, end in zip([0, *ends], ends, strict=False)
    ]


def _first_call(step: Step) -> tuple[Tensor, Tensor]:
    """Prompts go where long sequences are fastest: to the kernels that know nothing of pages."""
    geometry = Geometry(step.q.shape[2], step.k.shape[2], True, step.cache.window)
    call = Call(
        step.q, step.k, step.v, step.form, geometry, step.scale, step.tolerance, step.backend
    )
    results = call.run()
    for piece in _pieces(step):
        cache, tokens = step.cache, piece.k.shape[2]
        lengths = cache.lengths_with(tokens)
        cache.advance(tokens, cache.write(piece.k, piece.v, piece.sums, lengths, step.backend))
    return results


def _later_call(step: Step) -> tuple[Tensor, Tensor]:
    results = [_appended(piece) for piece in _pieces(step)]
    if len(results) == 1:
        return results[0]
    return tuple(torch.cat(parts, 2) for parts in zip(*results, strict=True))


def _appended(step: Step) -> tuple[Tensor, Tensor]:
    """Appends tokens for which there is room, and attends to them."""
    cache, tokens = step.cache, step.k.shape[2]
    lengths = cache.lengths_with(tokens)
    last_sums = cache.write(step.k, step.v, step.sums, lengths, step.backend)
    o, lse = _reference(step, lengths) if step.backend == "reference" else _kernel(step, lengths)
    cache.advance(tokens, last_sums)
    return o, lse


def _kernel(step: Step, lengths: Tensor) -> tuple[Tensor, Tensor]:
    q, cache, form = step.q, step.cache, step.form
    terms = cache.sums if isinstance(form, Cumulative) else form and form.terms
    bounds = [*cache.bounds.tensors()]
    if step.peaks is not None:
        bounds[2:] = None, step.peaks
    return decode_ops.decode(
        *(q, cache.k, cache.v, cache.table.entries, lengths, terms, form and form.gain, bounds),
        *(form.name if form else "none", step.scale, cache.window, step.tolerance, step.backend),
    )


def _reference(step: Step, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence after the other, half precision in float32, as the kernels do."""
    real = torch.promote_types(step.q.dtype, torch.float32)
    results = [_reference_of(step, b, length, real) for b, length in enumerate(lengths.tolist())]
    o, lse = (torch.cat(parts) for parts in zip(*results, strict=True))
    return o.to(step.q.dtype), lse


def _reference_of(step: Step, b: int, length: int, real: torch.dtype) -> tuple[Tensor, Tensor]:
    cache, form, q = step.cache, step.form, step.q[b : b + 1]
    window, n_query = cache.window, q.shape[2]
    first = 0 if window is None else max(0, length - n_query - window + 1)
    k, v, sums = cache.contents(b, first, length)
    geometry = Geometry(n_query, length - first, True, window)
    dense = None
    if form is not None:
        if isinstance(form, Cumulative):
            form = replace(form, sums=sums, gain=_of_sequence(form.gain, b))
        elif isinstance(form, Linear):
            form = replace(form, slopes=_of_sequence(form.slopes, b))
        else:
            form = replace(form, table=_of_sequence(form.table, b))
        dense = form.dense(geometry).to(real)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(real) for x in (q, k, v))
        return reference.attention(q, k, v, dense, geometry, step.scale)


def _of_sequence(x: Tensor | None, b: int) -> Tensor | None:
    return x if x is None or x.shape[0] == 1 else x[b : b + 1]
