"""Decoding by the Triton kernels, on a GPU or, without one, in the emulator."""

from __future__ import annotations

import random

import pytest
import torch

from biased_flash_attn import KVCache, biased_flash_attn_with_kvcache, biases
from tests.decoding.cases import STORAGES, check_decoding, decoded, make_cache
from tests.decoding.skipping_cases import (
    AT_THE_LIMIT,
    BIASES,
    CAN_GO,
    CONTENTS,
    check_bounds_of_an_earlier_bias,
    check_first_tile,
    check_infinity,
    check_tolerance,
)
from tests.kernels.triton.backend import KERNELS, MARKS
from tests.support.biases import FORMS
from tests.support.cases import Case, pairwise
from tests.support.problems import drawn

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = MARKS


@pytest.fixture(autouse=True)
def min_tiles_per_part(monkeypatch):
    """Divides even a few keys into several parts, or into one as by default."""
    if KERNELS is not None:
        from biased_flash_attn.triton_kernels.launch import decoding

        monkeypatch.setattr(decoding, "_MIN_TILES", random.choice([1, 4]))


# The parameters for which Triton compiles different kernels.
COMBINATIONS = pairwise(
    bias=list(FORMS),
    dtype=DTYPES,
    dims=[(16, 16), (19, 40)],
    heads=[(4, 2), (3, 1)],
    window=[None, 20],
)


@pytest.mark.parametrize("row", COMBINATIONS, ids=lambda row: "-".join(map(str, row.values())))
def test_decoding_steps_equal_one_call(row):
    tokens = random.choice([1, 17, 63, 130])
    sizes, storage = random.choice([(17, 1), (63, 3), (130,)]), random.choice(STORAGES)
    print(tokens, sizes, storage)
    problem = drawn(Case(lengths=(tokens, tokens), **row))
    first = max(0, tokens - 25)
    steps = (first, *sizes) if first else sizes
    cache = make_cache(problem, storage)
    check_decoding(problem, *decoded(problem, cache, steps, "triton"))


def test_queries_before_the_first_key_are_empty():
    problem = drawn(Case("cumulative-gain", lengths=(9, 9)))
    cache = make_cache(problem, "contiguous")
    with torch.no_grad():
        o, lse = biased_flash_attn_with_kvcache(
            problem.q, cache, problem.k, problem.v, return_lse=True, backend="triton"
        )
        cache.truncate(4)
        o, lse = biased_flash_attn_with_kvcache(problem.q, cache, return_lse=True, backend="triton")
    assert (o[:, :, :5] == 0).all()
    assert (lse[:, :, :5] == -torch.inf).all()
    assert lse[:, :, 5:].isfinite().all()


def test_float64_is_refused():
    problem = drawn(Case(dtype=torch.float64, lengths=(3, 3)))
    cache = make_cache(problem, "contiguous")
    with pytest.raises(ValueError, match="backend='triton'"):
        decoded(problem, cache, (3,), "triton")
    assert cache.lengths == [0, 0]


@pytest.mark.parametrize("name", BIASES)
def test_skipped_mass_is_within_tolerance(name):
    content, page_size = random.choice(CONTENTS), random.choice([16, 64, 128])
    lengths, window = (random.randint(1, 5), random.randint(1024, 1400)), random.choice([None, 700])
    tolerance = random.choice([0.3, 1e-2, 2.0**-12])
    print(content, page_size, lengths, window, tolerance)
    check_tolerance(name, content, lengths, tolerance, page_size, window, torch.float32, "triton")


@pytest.mark.parametrize("name", BIASES)
def test_bounds_hold_for_keys_at_their_limit(name):
    lengths, window = (random.randint(1, 3), random.randint(1300, 1700)), random.choice([None, 900])
    tolerance, page_size = random.choice([1e-2, 2.0**-12]), random.choice([16, 64])
    print(lengths, window, tolerance, page_size)
    check_tolerance(
        name, AT_THE_LIMIT, lengths, tolerance, page_size, window, torch.float32, "triton"
    )


@pytest.mark.parametrize("name", CAN_GO)
def test_negligible_distant_tiles_are_not_read(name, drawn_dtype):
    check_first_tile(name, drawn_dtype, "triton")


@pytest.mark.parametrize("place", ["k", "v"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_values_are_never_skipped(place, value):
    check_infinity(place, value, "triton")


def test_bounds_are_those_of_the_bias():
    check_bounds_of_an_earlier_bias("triton")


def test_a_chunk_may_fill_a_ring(monkeypatch):
    """The chunk has one tile more than the ring: the first and the last have the same address."""
    from biased_flash_attn.triton_kernels.launch import decoding

    choose, chosen = decoding._with_lists, []

    def with_lists(*arguments):
        chosen.append(choose(*arguments))
        return chosen[-1]

    monkeypatch.setattr(decoding, "_with_lists", with_lists)
    n, window, page_size = 1100, 300, 64
    bias = biases.ALiBi(4, shift=4)  # not steep enough to skip a tile
    q, k = torch.randn(1, 4, n, 16), torch.randn(1, 2, n, 16)
    o = []
    for tolerance in (0.0, 1e-4):
        cache = KVCache(1, 2, 16, window=window, page_size=page_size)
        first = n - cache.most_tokens
        with torch.no_grad():
            for part in (slice(0, first), slice(first, n)):
                queries = q[:, :, part] if part.stop == n else q[:, :, :0]
                step = biased_flash_attn_with_kvcache(
                    queries,
                    cache,
                    k[:, :, part],
                    k[:, :, part],
                    bias,
                    tolerance=tolerance,
                    backend="triton",
                )
        o.append(step)
    spread = float(k.amax() - k.amin())
    assert (o[0] - o[1]).abs().max() <= 1e-4 * spread + 1e-5
    last = chosen[-1]
    assert last.counts.max() == last.max_tiles == last.lists.shape[1]
