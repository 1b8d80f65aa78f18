"""The public call of decoding: validate, lower the bias, append, attend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from .. import operators
from ..attention import attend, complete, lowered, lowered_over
from ..autocast import without_autocast
from ..backends import DECODING
from ..biases.tabulated import Tabulated
from ..forms import DecodableForm, Form, Geometry, NoBias
from ..keywords import explains_keywords
from ..problem import Pages, Problem, TileBounds
from ..sequences import Sequences
from ..shared_constants import PEAK_DISTANCES
from ..skipping.plans import MIN_KEYS
from ..validation import check_bias, check_form, refuse_gradients
from .distance_tables import DistanceTables, Extremes, refuse_undefined
from .kv_cache import KVCache, layout_of


@explains_keywords(
    is_causal="attention to a cache is causal",
    window_size="the window is that of the KVCache",
)
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
            tokens. A `RelativeBias` has the factors of the queries and of the new keys. The cache
            keeps tables over distances until it is empty again. It detects when parameters and
            buffers change, and variables that a function reads, other than containers; it does not
            detect changes of large tensors (more than 2^14 values), or of any on GPUs, through
            `.data`.
        scale: factor of q k^T, 1 / sqrt(D) by default.
        tolerance: the fraction of each query's softmax mass that may be skipped, as in
            `biased_flash_attn`; "reference" computes everything.
        return_lse: also return log sum_j exp(scale q k^T + bias), natural logarithm.
        backend: "triton" (GPUs), "cpu" or "reference", which runs or raises; None chooses.

    Returns:
        o (B, H, Nq, Dv) in q's dtype and, with return_lse, lse (B, H, Nq) in float32, or float64
        for float64. A query without visible keys has o = 0 and lse = -inf.

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
            The cache is then unchanged.

    Splitting the keys of a query over threads follows Dao et al., "Flash-Decoding for long-context
    inference", 2023; each bias names its paper.
    """
    step = _prepared(q, cache, k, v, bias, scale, tolerance, backend)
    cache.reserve(step.new.k.shape[2])
    results = _prefill(step) if step.is_prefill else _decode_steps(step)
    return results if return_lse else results[0]


@dataclass(frozen=True)
class Step:
    """A call whose arguments have been validated and completed.

    new: attention to the new tokens alone; the state of its form is continued from earlier tokens.
    extremes: the minima and maxima of the blocks of the form's tables.
    """

    new: Problem
    cache: KVCache
    extremes: Extremes

    @property
    def is_prefill(self) -> bool:
        """Whether the call equals an ordinary one: all keys are new, and each has a query."""
        return not any(self.cache.lengths) and 0 < self.new.k.shape[2] == self.new.q.shape[2]

    def part(self, tokens: slice, queries: slice) -> Step:
        """Returns the step restricted to some of the new tokens and queries."""
        new = replace(
            self.new,
            q=self.new.q[:, :, queries],
            k=self.new.k[:, :, tokens],
            v=self.new.v[:, :, tokens],
            form=self.new.form.for_tokens(tokens, queries),
            geometry=Geometry(
                queries.stop - queries.start, tokens.stop - tokens.start, True, self.cache.window
            ),
        )
        return replace(self, new=new)

    def write(self) -> tuple[Tensor, Tensor | None]:
        """Writes the tokens, whose pages are reserved; returns the new lengths and the last
        state."""
        new = self.new
        lengths, state = self.cache.lengths_with(new.k.shape[2]), new.form.state
        if state is not None:
            state = state.expand(len(new.q), *[-1] * (state.dim() - 1))
        return lengths, self.cache.write(new.k, new.v, state, lengths, new.backend)


def _prepared(q, cache, k, v, bias, scale, tolerance, backend) -> Step:
    """Validates and completes the arguments of `biased_flash_attn_with_kvcache`."""
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache is a {type(cache).__name__}; it must be a KVCache")
    if (k is None) != (v is None):
        given, missing = ("v", "k") if k is None else ("k", "v")
        raise ValueError(f"{given} is given and {missing} is None; new tokens need both")
    # Without new tokens, q takes the place of k and v in the checks.
    new = complete(
        q,
        *((q, q) if k is None else (k, v)),
        partial(_new_tokens, cache, k is not None),
        partial(_lowered, bias, cache),
        scale=scale,
        tolerance=tolerance,
        backend=backend,
        call=DECODING,
    )
    form, extremes = new.form, _extremes(bias, cache, new.form)
    if form.state is not None and any(cache.lengths):
        form = form.continued(cache.last_state)
    few = max(cache.lengths) + new.geometry.n_key < MIN_KEYS
    tolerance = 0.0 if few or not form.may_skip else new.tolerance
    if k is None:
        k, v = (x.new_empty((cache.batch, x.shape[1], 0, x.shape[3])) for x in (cache.k, cache.v))
    else:
        k, v = new.k, new.v
    new = Problem(new.q, k, v, form, new.geometry, new.scale, tolerance, new.backend)
    return Step(new, cache, extremes)


def _new_tokens(cache: KVCache, appends: bool, q: Tensor, k: Tensor, v: Tensor) -> Geometry:
    """Returns the geometry of the new tokens alone."""
    refuse_gradients({"q": q, "k": k, "v": v})
    tokens = k.shape[2] if appends else 0
    _check_cache(cache, q, {"k": k, "v": v} if appends else {}, tokens)
    return Geometry(q.shape[2], tokens, True, cache.window)


def _check_cache(cache: KVCache, q: Tensor, appended: dict[str, Tensor], tokens: int) -> None:
    """Validates the dtypes, devices and shapes of tensors against those of the cache."""
    kv_heads = cache.k.shape[1]
    for name, x in {"q": q, **appended}.items():
        heads = None if name == "q" else kv_heads
        dim = (cache.v if name == "v" else cache.k).shape[3]
        if x.dtype != cache.k.dtype:
            raise TypeError(
                f"{name} is {x.dtype}; the cache holds {cache.k.dtype}, and must have been created"
                f" with dtype={x.dtype}"
            )
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
    most, n_query = cache.most_tokens, q.shape[2]
    if most is not None and n_query > max(tokens, most):
        raise ValueError(
            f"q has {n_query} queries; with {tokens} new tokens and window {cache.window} it may"
            f" have {max(tokens, most)}: the keys of older ones are overwritten"
        )


def _lowered(bias, cache: KVCache, q: Tensor, new: Geometry) -> Form:
    """Returns the form of a bias, with the state of the new tokens only if it has one."""
    tokens = new.n_key
    if bias is None:
        _check_state(None, cache, tokens)
        return NoBias()
    check_bias(bias, q)
    for x in bias.parameters() if isinstance(bias, nn.Module) else ():
        refuse_gradients({"bias": x})
    appended, checked = _appended(q, cache, tokens), cache.checked
    tables = cache.distance_tables if isinstance(bias, Tabulated) else None
    if tables is not None and tables.is_of(bias):
        for x in tables.sources:
            refuse_gradients({"bias": x} if isinstance(x, Tensor) else {})
        with without_autocast(q.device):
            form = tables.upto(bias.table_length(appended), bias)
            checked = form.tensors
            form = bias.over(form, appended, torch.promote_types(q.dtype, torch.float32))
        check_form(form, q, appended)
    elif isinstance(bias, Tabulated):
        tables, form = None, lowered(bias, q, appended)
    else:
        every = Geometry(q.shape[2], max(cache.lengths) + tokens, True, cache.window)

        def geometry_of(form: Form) -> Geometry:
            if not isinstance(form, DecodableForm):
                raise ValueError(f"bias has the form {form.name!r}, which cannot be decoded")
            if form.per_pair and form.state is None:
                return every
            return appended if form.per_pair or form.spans_sequence else new

        form = lowered_over(bias, q, new, geometry_of)
    for x in form.tensors:
        refuse_gradients({"bias": x})
    _check_state(form.state, cache, tokens)
    refuse_undefined(form, checked)
    if not isinstance(bias, Tabulated):
        cache.checked = form.tensors
    elif tables is None:
        cache.distance_tables = DistanceTables(bias, form)
    return form


def _extremes(bias, cache: KVCache, form: Form) -> Extremes:
    """Returns the extremes of the blocks of the tables of the bias's form, if it has them."""
    if isinstance(bias, Tabulated):
        return cache.distance_tables.extremes_upto(form.tables[0].shape[-1])
    return form.extremes(PEAK_DISTANCES)


def _appended(q: Tensor, cache: KVCache, tokens: int) -> Geometry:
    """Returns the geometry of the queries and the new keys, whose positions follow those of the
    cached keys."""
    n_query, longest, sequences = q.shape[2], max(cache.lengths), None
    if min(cache.lengths) < longest:
        rows = [[0, n_query, 0, tokens, length] for length in cache.lengths]
        rows = torch.tensor(rows, device=q.device)
        sizes = n_query, tokens, n_query, tokens
        sequences = Sequences(rows, *sizes, is_packed=False, longest_shift=longest)
    return Geometry(n_query, tokens, True, cache.window, sequences, longest)


def _check_state(state: Tensor | None, cache: KVCache, tokens: int) -> None:
    """Validates that the bias has values per key if and only if that of the cached tokens does."""
    held = cache.state
    if not any(cache.lengths) or (state is None and (held is None or not tokens)):
        return
    if state is None:
        raise ValueError(f"the cache was filled with a bias with {_kind(held)}; this bias has none")
    if held is None or _kind(held) != _kind(state):
        raise ValueError(
            f"bias has {_kind(state)}, but the cache was filled with a bias without them"
        )
    if layout_of(held) != layout_of(state):
        raise ValueError(
            f"bias has {_kind(state)} of {_described(state)}; the cache holds those of"
            f" {_described(held)}"
        )


def _kind(state: Tensor) -> str:
    return "steps" if state.dim() == 3 else "key factors"


def _described(state: Tensor) -> str:
    rank = f", rank {state.shape[3]}" if state.dim() == 4 else ""
    return f"{state.shape[1]} heads{rank} and {state.dtype}"


def _split(step: Step) -> list[Step]:
    """Splits a step into steps of at most as many tokens as a sliding cache can append at once."""
    most, tokens, n_query = step.cache.most_tokens, step.new.k.shape[2], step.new.q.shape[2]
    if most is None or tokens <= most:
        return [step]
    before = tokens - n_query  # new tokens without a query
    ends = [*range(most, tokens, most), tokens]
    return [
        step.part(slice(first, end), slice(max(0, first - before), max(0, end - before)))
        for first, end in zip([0, *ends], ends, strict=False)
    ]


def _prefill(step: Step) -> tuple[Tensor, Tensor]:
    """Computes a prompt with the ordinary kernels, which are faster for long sequences, and caches
    it."""
    results = attend(step.new)
    for piece in _split(step):
        _, last_state = piece.write()
        step.cache.advance(piece.new.k.shape[2], last_state)
    return results


def _decode_steps(step: Step) -> tuple[Tensor, Tensor]:
    results = [_append_and_attend(piece) for piece in _split(step)]
    if len(results) == 1:
        return results[0]
    return tuple(torch.cat(parts, 2) for parts in zip(*results, strict=True))


def _append_and_attend(step: Step) -> tuple[Tensor, Tensor]:
    """Appends tokens, whose pages are reserved, and computes their attention."""
    new, cache = step.new, step.cache
    lengths, last_state = step.write()
    form = new.form if new.form.state is None else new.form.with_state(cache.state)
    bounds = TileBounds(*cache.bounds.tensors(), *step.extremes)
    pages = Pages(cache.table.entries, lengths, bounds)
    results = operators.decode(new.over_pages(cache.k, cache.v, form, pages))
    cache.advance(new.k.shape[2], last_state)
    return results
