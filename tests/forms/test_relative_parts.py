"""Parts of a `relative` bias: sequences, chunks of other ranks, and subsets of queries and keys."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from biased_flash_attn import (
    KVCache,
    biased_flash_attn_varlen,
    biased_flash_attn_with_kvcache,
    biases,
)
from biased_flash_attn.forms import Geometry
from biased_flash_attn.forms.chunk_pairs import Pair
from tests.forms.relative_cases import REFERENCE, TERMS, drawn, leaves


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("beyond", ["zero", "last"])
def test_packed_sequences_equal_separate_calls(beyond, causal):
    lengths = [(4, 7), (0, 2), (5, 5), (6, 2), (3, 0)] if causal else [(4, 7), (5, 5), (1, 9)]
    totals = [sum(n) for n in zip(*lengths, strict=True)]
    whole = drawn(Geometry(*totals), batch=1, first=-3, extent=4, beyond=beyond)
    q, k = (torch.randn(n, 2, 4).double() for n in totals)
    ends = [torch.tensor([0, *itertools.accumulate(n)]).int() for n in zip(*lengths, strict=True)]
    o = biased_flash_attn_varlen(q, k, k, *ends, bias=whole, causal=causal, backend="reference")
    rows = zip(*(zip(x.tolist(), x.tolist()[1:], strict=False) for x in ends), strict=True)
    for of_queries, of_keys in rows:
        at, keys = slice(*of_queries), slice(*of_keys)
        alone = biases.RelativeBias(
            whole.query_factors[:, :, at],
            whole.query_tables,
            whole.key_factors[:, :, keys],
            whole.key_tables,
            first=-3,
            beyond=beyond,
        )
        parts = (x.transpose(0, 1)[None] for x in (q[at], k[keys], k[keys]))
        expected = REFERENCE(*parts, alone, causal=causal)
        torch.testing.assert_close(o[at], expected[0].transpose(0, 1))


def test_padding_is_never_read():
    bias = drawn(Geometry(9, 9), first=-2, extent=4)
    with torch.no_grad():
        for x in (bias.query_factors, bias.key_factors):
            x[0, :, 6:] = torch.nan
            x[1, :, :4] = torch.nan
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0, 6:], mask[1, :4] = False, False
    q = torch.randn(2, 2, 9, 4).double()
    o = REFERENCE(q, q, q, bias, key_padding_mask=mask, causal=False)
    assert o.isfinite().all()
    grads = torch.autograd.grad(o.sum(), [*leaves(bias).values()])
    assert all(x.isfinite().all() for x in grads)
    assert (grads[0][0, :, 6:] == 0).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("beyond", ["zero", "last"])
@pytest.mark.parametrize(
    ("first", "extent"), [(0, 1), (0, 6), (0, 40), (-2, 3), (-5, 9), (-30, 30)]
)
def test_pairs_of_chunks_are_parts_of_the_whole(first, extent, beyond, causal):
    n, chunks = 5, 4
    whole = Geometry(n * chunks, n * chunks, causal)
    bias = drawn(whole, first=first, extent=extent, beyond=beyond)
    dense = bias.lower(whole, torch.float64, None).dense(whole)
    for query_chunk, key_chunk in itertools.product(range(chunks), range(chunks)):
        if causal and key_chunk > query_chunk:
            continue
        pair = Pair(query_chunk, key_chunk, n, chunks, causal, None)
        at, keys = (slice(c * n, (c + 1) * n) for c in (query_chunk, key_chunk))
        # A rank has its own queries' factors, and those of all keys.
        own = Geometry(n, n * chunks, causal)
        part = biases.RelativeBias(
            bias.query_factors[:, :, at],
            bias.query_tables,
            bias.key_factors,
            bias.key_tables,
            first=first,
            beyond=beyond,
        )
        form = part.lower(own, torch.float64, None).for_pair(pair, None)
        ours, exact = form.dense(pair.geometry), dense[:, :, at, keys]
        seen = pair.geometry.visible()
        assert form.n_columns <= 2 * max(2 * n, abs(first) + extent)
        torch.testing.assert_close(ours.where(seen, 0), exact.where(seen, 0))


@pytest.mark.parametrize("first", [0, -4])
def test_queries_and_keys_are_parts_of_the_whole(first):
    geometry = Geometry(8, 8, first == 0)
    form = drawn(geometry, first=first).lower(geometry, torch.float64, None)
    dense = form.dense(geometry)
    at = slice(3, 8)
    part = form.for_queries(at).for_keys(at)
    own = Geometry(5, 5, first == 0)
    assert torch.equal(part.dense(own), dense[:, :, at, at])
    near = Geometry(8, 8, True, 3)
    past = near.visible()
    assert torch.equal(form.within(geometry, near).dense(near), dense.where(past, 0))


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("beyond", ["zero", "last"])
@pytest.mark.parametrize("terms", TERMS)
def test_decoding_takes_the_factors_of_new_tokens(terms, beyond, window):
    whole = drawn(Geometry(20, 20), extent=7, terms=terms, beyond=beyond)
    q = torch.randn(2, 2, 20, 4).double()
    exact = REFERENCE(q, q, q, whole, window=window)
    cache = KVCache(2, 2, 4, dtype=torch.float64, window=window)
    done = 0
    for tokens in (9, 1, 3, 7):
        at = slice(done, done + tokens)
        with torch.no_grad():
            bias = replace(
                whole,
                query_factors=part(whole.query_factors, at),
                key_factors=part(whole.key_factors, at),
                **{name: x.detach() for name, x in leaves(whole).items() if "tables" in name},
            )
            x = q[:, :, at]
            o = biased_flash_attn_with_kvcache(x, cache, x, x, bias, backend="reference")
        torch.testing.assert_close(o, exact[:, :, at].detach())
        done += tokens


def part(factors: Tensor | None, rows: slice) -> Tensor | None:
    return None if factors is None else factors.detach()[:, :, rows]
