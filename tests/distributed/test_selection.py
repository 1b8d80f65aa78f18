"""Keys that ranks do not request hold at most their part of the tolerance, for any keys and sums.

Some keys and sums are equal, for which the bound is almost exact, and lse covers its whole range,
so that an error in any term would be detected.
"""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn.forms import Distance, Form, from_tensors
from biased_flash_attn.forms.chunk_pairs import Pair

N, DIM, HEADS, KV_HEADS, TRIALS, TOLERANCE = 192, 8, 4, 2, 64, 0.5
PAIRS = [Pair(query, key, N, 8, False, None) for query, key in [(5, 4), (6, 2), (1, 2), (3, 7)]]


def either(*shape: int) -> torch.Tensor:
    """0 or 1 for each trial, (TRIALS, 1, ...)."""
    return torch.randint(2, (TRIALS, *[1] * len(shape))).double()


def drawn_keys(pair: Pair):
    """q, k, scale and scale q.k (TRIALS, HEADS, N, N), of equal or different keys."""
    k = 3 * torch.randn(TRIALS, KV_HEADS, 1, DIM) + 0 * torch.randn(N, 1)
    k, q = k + either(1, 1, 1) * torch.randn(N, DIM), torch.randn(TRIALS, HEADS, 1, DIM)
    q, k = q.double().expand(-1, -1, N, -1), k.double()
    return q, k, q @ k.repeat_interleave(HEADS // KV_HEADS, 1).mT


def check(pair, q, k, logits, form: Form, of_queries=None, of_keys=None):
    """logits: of all pairs, with the bias."""
    from biased_flash_attn.distributed.selection import KeySummary, Queries, ranges

    masses = logits.double().logsumexp(-1)
    lse = masses.amin((1, 2), keepdim=True) + 60 * torch.rand(TRIALS, 1, 1).double() - 5
    lse = lse.expand(-1, HEADS, N)
    longest = k.norm(dim=-1).amax(-1, keepdim=True).repeat_interleave(HEADS // KV_HEADS, 1)
    queries = Queries(q, lse, longest, form, of_queries, 1.0)
    known = KeySummary.of(k, torch.zeros_like(k), of_keys)
    taken = ranges(pair, queries, known, TOLERANCE)
    begin, end = taken.repeat_interleave(HEADS // KV_HEADS, 1)[..., None, None, :].unbind(-1)
    j = torch.arange(N)
    skipped = logits.masked_fill((begin <= j) & (j < end), -torch.inf).logsumexp(-1)
    allowed = torch.tensor(TOLERANCE / pair.max_other_chunks).log()
    assert (skipped <= lse + allowed).all()
    assert 0 < (taken[..., 0] < taken[..., 1]).double().mean() < 1


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_requested_keys_of_tables_suffice(pair):
    """Tables that rise, fall and jump with the distance."""
    q, k, products = drawn_keys(pair)
    whole = pair.whole
    table = torch.randn(1, HEADS, whole.n_distances).double()
    first = N + pair.distance_offset - whole.first_distance
    table[..., first - N : first + N] *= torch.linspace(0, 3, 2 * N)
    bias = table[..., first + torch.arange(N)[:, None] - torch.arange(N)]
    check(pair, q, k, products + bias, Distance(table))


@pytest.mark.parametrize("form", ["cumulative", "log1p_square"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_requested_keys_of_prefix_sums_suffice(pair, form):
    """Sums that rise and fall, with gains of both signs."""
    q, k, products = drawn_keys(pair)
    of_keys = 3 * torch.randn(TRIALS, HEADS, 1).double() + 0 * torch.randn(N)
    of_keys = of_keys + either(1, 1) * torch.randn(TRIALS, HEADS, N).cumsum(-1)
    of_queries = torch.randn(TRIALS, HEADS, 1).double().expand(-1, -1, N)
    gain = torch.randn(TRIALS, HEADS, 1).expand(-1, -1, N)
    beta = gain.double()[..., None] * (of_queries[..., None] - of_keys[..., None, :])
    bias = -beta.square().log1p() if form == "log1p_square" else beta * (1 if pair.is_past else -1)
    form = from_tensors(form, [of_queries, gain])
    check(pair, q, k, products + bias, form, of_queries, of_keys)
