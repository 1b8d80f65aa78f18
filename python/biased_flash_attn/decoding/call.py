"""The public call of decoding: validate, lower the bias, append, attend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import operators
from ..attention import DEFAULT_TOLERANCES, attend, lowered_over, under_autocast
from ..backends import registry
from ..forms import Form, Geometry, NoBias
from ..problem import Bounds, Pages, Problem
from ..sequences import Sequences
from ..shared_constants import PEAK_DISTANCES
from ..skipping.plans import MIN_KEYS
from ..validation import check_bias, check_options, check_tensors, refuse_gradients
from .distance_table import DistanceTable
from .kv_cache import KVCache


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
    """Appends k and v to a cache, and computes causal attention to all cached keys.

    The last query has the position of the last key of its sequence: n queries with n new keys give
    the results of `biased_flash_attn` for the last n queries of the whole sequence. A step may
    append one token or several. There are no gradients: call it under torch.no_grad().

    Args:
        q: (B, H, Nq, D) in the cache's dtype; H a multiple of the cache's Hkv.
        cache: the keys and values of previous calls, to which this call appends its tokens. If it
            has a window, that is the window of the attention.
        k: (B, Hkv, N, D), the keys of N new tokens of each sequence, or None.
        v: (B, Hkv, N, Dv), their values; given with k.
        bias: a bias of `biased_flash_attn.biases`, or None. A cumulative bias has the steps of the
            N new tokens and the gains of the queries: cable(x) with the hidden states of the new
            tokens. The table of a function of the distance is cached until the cache is empty
            again; the function must not change before then.
        scale: factor of q k^T, 1 / sqrt(D) by default.
        tolerance: the fraction of each query's softmax mass that may be skipped, as in
            `biased_flash_attn`; "reference" computes everything.
        return_lse: also return log sum_j exp(scale q k^T + bias), natural logarithm.
        backend: "triton" (GPUs), "cpu" or "reference", which runs or raises; None chooses.

    Returns:
        o (B, H, Nq, Dv) in q's dtype and, with return_lse, lse (B, H, Nq) in float32, or float64
        for float64. A query without visible keys has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: naming the argument, the value it had, and the values it may have.
            The cache is then unchanged.

    Splitting the keys of a query over threads follows Dao et al., "Flash-Decoding for long-context
    inference", 2023; each bias names its paper.
    """
    step = _prepared(q, cache, k, v, bias, scale, tolerance, backend)
    cache.reserve(step.k.shape[2])
    results = _prefill(step) if step.is_prefill else _decode_steps(step)
    return results if return_lse else results[0]


@dataclass(frozen=True)
class Step:
    """A call whose arguments have been validated and completed.

    form: its state holds the prefix sums at the new tokens, (B or 1, H or 1, N), counted from the
    first token of each sequence. extremes: the minima and maxima of the blocks of a distance table.
    """

    q: Tensor
    cache: KVCache
    k: Tensor
    v: Tensor
    form: Form
    extremes: tuple[Tensor | None, Tensor | None]
    scale: float
    tolerance: float
    backend: str

    @property
    def is_prefill(self) -> bool:
        """Whether the call equals an ordinary one: all keys are new, and each has a query."""
        tokens = self.k.shape[2]
        return not any(self.cache.lengths) and 0 < tokens == self.q.shape[2]

    def of(self, tokens: slice, queries: slice) -> Step:
        """Returns the step restricted to some of the new tokens and queries."""
        return replace(
            self,
            q=self.q[:, :, queries],
            k=self.k[:, :, tokens],
            v=self.v[:, :, tokens],
            form=self.form.of_tokens(tokens, queries),
        )

    def write(self) -> tuple[Tensor, Tensor | None]:
        """Writes the tokens, whose pages are reserved; returns the new lengths and the last
        state."""
        lengths, state = self.cache.lengths_with(self.k.shape[2]), self.form.state
        if state is not None:
            state = state.expand(*self.q.shape[:2], -1)
        return lengths, self.cache.write(self.k, self.v, state, lengths, self.backend)


def _prepared(q, cache, k, v, bias, scale, tolerance, backend) -> Step:
    """Validates and completes the arguments of `biased_flash_attn_with_kvcache`."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a KVCache")
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{given} is given and {missing} is None; new tokens need both")
    if k is None:
        q, _, _ = under_autocast(q, q, q)
        check_tensors(q, q, q)
        k, v = (x.new_empty((cache.batch, x.shape[1], 0, x.shape[3])) for x in (cache.k, cache.v))
    else:
        q, k, v = under_autocast(q, k, v)
        check_tensors(q, k, v)
    _check_cache(q, cache, k, v)
    check_options(True, None, scale, tolerance, backend)
    backend = registry.choose(q, backend)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tolerance = DEFAULT_TOLERANCES[q.dtype] if tolerance is None else float(tolerance)
    if bias is not None:
        check_bias(bias, q)
    refuse_gradients({"q": q, "k": k, "v": v})
    for x in bias.parameters() if isinstance(bias, nn.Module) else ():
        refuse_gradients({"bias": x})
    form, extremes = _lowered(bias, q, cache, k.shape[2])
    if form.state is not None and any(cache.lengths):
        form = form.continued(cache.last_sums[..., None])
    few = max(cache.lengths) + k.shape[2] < MIN_KEYS
    tolerance = 0.0 if few or not form.may_skip else tolerance
    return Step(q, cache, k, v, form, extremes, scale, tolerance, backend)


def _check_cache(q: Tensor, cache: KVCache, k: Tensor, v: Tensor) -> None:
    """Validates the dtypes, devices and shapes of tensors against those of the cache."""
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


def _lowered(
    bias, q: Tensor, cache: KVCache, tokens: int
) -> tuple[Form, tuple[Tensor | None, Tensor | None]]:
    """Returns the form of a bias over all keys including the new ones, or over the new tokens if it
    has a state; and the extremes of the blocks of its distance table, if it has one."""
    if bias is None:
        _check_state(None, q, cache, tokens)
        return NoBias(), (None, None)
    real = torch.promote_types(q.dtype, torch.float32)
    if DistanceTable.serves(bias):
        _check_state(None, q, cache, tokens)
        if cache.distance_table is None or not cache.distance_table.is_of(bias):
            cache.distance_table = DistanceTable(bias, real, q.device)
        with torch.no_grad():
            form, peaks = cache.distance_table.upto(_all_keys(q, cache, tokens).n_distances)
        return form, (None, peaks)
    every = _all_keys(q, cache, tokens)
    form = lowered_over(bias, q, tokens=Geometry(q.shape[2], tokens), pairs=every, positions=every)
    for x in form.tensors:
        refuse_gradients({"bias": x})
    _check_state(form.state, q, cache, tokens)
    if [*map(id, form.tensors)] != [*map(id, cache.checked)]:
        _refuse_nan(form)
        cache.checked = form.tensors
    return form, form.extremes(PEAK_DISTANCES)


def _all_keys(q: Tensor, cache: KVCache, tokens: int) -> Geometry:
    """Returns the geometry of the queries and all keys, including the new ones."""
    n_query, longest, sequences = q.shape[2], max(cache.lengths), None
    if min(cache.lengths) < longest:
        rows = [[0, n_query, 0, length + tokens, 0] for length in cache.lengths]
        n_key = longest + tokens
        rows = torch.tensor(rows, device=q.device)
        sequences = Sequences(rows, n_query, n_key, n_query, n_key, is_packed=False)
    return Geometry(n_query, max(1, longest + tokens), True, cache.window, sequences)


def _check_state(state: Tensor | None, q: Tensor, cache: KVCache, tokens: int) -> None:
    """Validates that the bias sums steps if and only if that of the cached tokens does."""
    if not any(cache.lengths):
        return
    if state is None:
        if cache.sums is not None and tokens:
            raise ValueError("bias sums no steps, but the cache holds tokens with sums")
        return
    if cache.sums is None:
        raise ValueError(
            "bias sums steps, but the cache holds tokens that were appended without them"
        )
    if cache.sums.shape[1] != q.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads; the cache holds sums of {cache.sums.shape[1]}")


def _refuse_nan(form: Form) -> None:
    """Raises ValueError for NaN, like the CPU kernels; on GPUs the check would synchronize."""
    for x, name in zip(form.tensors, form.tensor_names, strict=False):
        if x.device.type == "cpu" and x.sum().isnan() and x.isnan().any():
            raise ValueError(f"bias: its {name} contain NaN")


def _split(step: Step) -> list[Step]:
    """Splits a step into steps of at most as many tokens as a sliding cache can append at once."""
    most, tokens, n_query = step.cache.most_tokens, step.k.shape[2], step.q.shape[2]
    if most is None or tokens <= most:
        return [step]
    before = tokens - n_query  # new tokens without a query
    ends = [*range(most, tokens, most), tokens]
    return [
        step.of(slice(first, end), slice(max(0, first - before), max(0, end - before)))
        for first, end in zip([0, *ends], ends, strict=False)
    ]


def _prefill(step: Step) -> tuple[Tensor, Tensor]:
    """Computes a prompt with the ordinary kernels, which are faster for long sequences, and caches
    it."""
    geometry = Geometry(step.q.shape[2], step.k.shape[2], True, step.cache.window)
    settings = step.form, geometry, step.scale, step.tolerance, step.backend
    results = attend(Problem(step.q, step.k, step.v, *settings))
    for piece in _split(step):
        _, last_state = piece.write()
        step.cache.advance(piece.k.shape[2], last_state)
    return results


def _decode_steps(step: Step) -> tuple[Tensor, Tensor]:
    results = [_append_and_attend(piece) for piece in _split(step)]
    if len(results) == 1:
        return results[0]
    return tuple(torch.cat(parts, 2) for parts in zip(*results, strict=True))


def _append_and_attend(step: Step) -> tuple[Tensor, Tensor]:
    """Appends tokens, whose pages are reserved, and computes their attention."""
    cache = step.cache
    lengths, last_state = step.write()
    form = step.form if step.form.state is None else step.form.with_state(cache.sums)
    bounds = Bounds(*cache.bounds.tensors())
    if step.extremes[1] is not None:
        bounds = bounds._replace(lowest=step.extremes[0], highest=step.extremes[1])
    settings = cache.window, step.scale, step.tolerance, step.backend
    pages = Pages(cache.table.entries, lengths, bounds)
    results = operators.decode(Problem.of_pages(step.q, cache.k, cache.v, form, *settings, pages))
    cache.advance(step.k.shape[2], last_state)
    return results
