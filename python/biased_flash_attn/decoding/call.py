"""The public call of decoding: validate, lower the bias, append, attend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import operators
from ..attention import DEFAULT_TOLERANCES, attend, lowered_over, under_autocast
from ..backends import registry
from ..forms import Form, Geometry
from ..limits import PEAK_DISTANCES
from ..problem import Bounds, Pages, Problem
from ..skipping.plans import FEWEST_KEYS
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
        tolerance: the fraction of each query's softmax mass that may be skipped, as in
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

    form: its state is that of the new tokens, (B or 1, H or 1, N), from the first token of a
    sequence on. peaks: the largest entries of a table: see DistanceTable.
    """

    q: Tensor
    cache: KVCache
    k: Tensor
    v: Tensor
    form: Form
    peaks: Tensor | None
    scale: float
    tolerance: float
    backend: str

    @property
    def is_first(self) -> bool:
        """Whether it is an ordinary call: all keys are new, and each has its query."""
        tokens = self.k.shape[2]
        return not any(self.cache.lengths) and 0 < tokens == self.q.shape[2]

    def of(self, tokens: slice, queries: slice) -> Step:
        """The same for some of the new tokens and of the queries."""
        return replace(
            self,
            q=self.q[:, :, queries],
            k=self.k[:, :, tokens],
            v=self.v[:, :, tokens],
            form=self.form.of_tokens(tokens, queries),
        )

    def write(self) -> tuple[Tensor, Tensor | None]:
        """Writes the tokens, for which there is room: the lengths with them, and the last state."""
        lengths, state = self.cache.lengths_with(self.k.shape[2]), self.form.state
        if state is not None:
            state = state.expand(*self.q.shape[:2], -1)
        return lengths, self.cache.write(self.k, self.v, state, lengths, self.backend)


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
    backend = registry.choose(q, backend)
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    tolerance = DEFAULT_TOLERANCES[q.dtype] if tolerance is None else float(tolerance)
    if bias is not None:
        check_bias(bias, q)
    refuse_gradients({"q": q, "k": k, "v": v})
    for x in bias.parameters() if isinstance(bias, nn.Module) else ():
        refuse_gradients({"bias": x})
    form, peaks = _lowered(bias, q, cache, k.shape[2])
    if form.state is not None and any(cache.lengths):
        form = form.continued(cache.last_sums[..., None])
    few = max(cache.lengths) + k.shape[2] < FEWEST_KEYS
    tolerance = 0.0 if few or not form.may_skip else tolerance
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


def _lowered(bias, q: Tensor, cache: KVCache, tokens: int) -> tuple[Form, Tensor | None]:
    """The form of a bias over the keys there will be, or of one with a state over the new tokens;
    and the peaks of its numbers of distances, if it has any."""
    real = torch.promote_types(q.dtype, torch.float32)
    if DistanceTable.serves(bias):
        _check_state(None, q, cache, tokens)
        if cache.distance_table is None or not cache.distance_table.is_of(bias):
            cache.distance_table = DistanceTable(bias, real, q.device)
        with torch.no_grad():
            return cache.distance_table.upto(_all_keys(q, cache, tokens).n_distances)
    every = _all_keys(q, cache, tokens)
    form = lowered_over(bias, q, tokens=Geometry(q.shape[2], tokens), pairs=every, positions=every)
    for x in form.tensors:
        refuse_gradients({"bias": x})
    _check_state(form.state, q, cache, tokens)
    if [*map(id, form.tensors)] != [*map(id, cache.checked)]:
        _refuse_nan(form)
        cache.checked = form.tensors
    return form, form.peaks(PEAK_DISTANCES)


def _all_keys(q: Tensor, cache: KVCache, tokens: int) -> Geometry:
    """That of the queries and the keys there will be."""
    return Geometry(q.shape[2], max(1, max(cache.lengths) + tokens), True, cache.window)


def _check_state(state: Tensor | None, q: Tensor, cache: KVCache, tokens: int) -> None:
    """Whether the bias sums steps as that of the cached tokens does."""
    if not any(cache.lengths):
        return
    if state is None:
        if cache.sums is not None and tokens:
            raise ValueError("bias sums no steps, and the cache holds tokens with sums")
        return
    if cache.sums is None:
        raise ValueError(
            "bias sums steps, and the cache holds tokens that were appended without them"
        )
    if cache.sums.shape[1] != q.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads; the cache holds sums of {cache.sums.shape[1]}")


def _refuse_nan(form: Form) -> None:
    """As the CPU kernels do of ordinary calls; on GPUs the caller would have to wait for it."""
    for x, name in zip(form.tensors, form.tensor_names, strict=False):
        if x.device.type == "cpu" and x.sum().isnan() and x.isnan().any():
            raise ValueError(f"bias: its {name} contain NaN")


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
    settings = step.form, geometry, step.scale, step.tolerance, step.backend
    results = attend(Problem(step.q, step.k, step.v, *settings))
    for piece in _pieces(step):
        _, last_state = piece.write()
        step.cache.advance(piece.k.shape[2], last_state)
    return results


def _later_call(step: Step) -> tuple[Tensor, Tensor]:
    results = [_appended(piece) for piece in _pieces(step)]
    if len(results) == 1:
        return results[0]
    return tuple(torch.cat(parts, 2) for parts in zip(*results, strict=True))


def _appended(step: Step) -> tuple[Tensor, Tensor]:
    """Appends tokens for which there is room, and attends to them."""
    cache = step.cache
    lengths, last_state = step.write()
    form = step.form if step.form.state is None else step.form.with_state(cache.sums)
    bounds = Bounds(*cache.bounds.tensors())
    if step.peaks is not None:
        bounds = bounds._replace(lowest=None, highest=step.peaks)
    settings = cache.window, step.scale, step.tolerance, step.backend
    pages = Pages(cache.table.entries, lengths, bounds)
    results = operators.decode(Problem.of_pages(step.q, cache.k, cache.v, form, *settings, pages))
    cache.advance(step.k.shape[2], last_state)
    return results
