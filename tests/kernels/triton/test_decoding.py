"""Decoding by the Triton kernels, on a GPU or, without one, in the emulator."""

from __future__ import annotations

import math
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


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("name", BIASES)
def test_bounds_hold_for_keys_at_their_limit(name, page_size):
    lengths, window = (random.randint(1, 3), random.randint(1300, 1700)), random.choice([None, 900])
    tolerance = random.choice([1e-2, 2.0**-12])
    print(lengths, window, tolerance)
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


@pytest.fixture
def selections(monkeypatch) -> list:
    """The arguments of the kernels of each step that selects tiles, with the lists of these."""
    from biased_flash_attn.triton_kernels.launch import decoding

    with_lists, made = decoding._with_lists, []

    def kept(*arguments):
        made.append(with_lists(*arguments))
        return made[-1]

    monkeypatch.setattr(decoding, "_with_lists", kept)
    return made


def test_large_terms_that_cancel_do_not_spend_more_than_the_tolerance(selections):
    """Sums in float32 would make the near keys, the only ones with a bias, count six times as much
    as they do."""
    n, near, rank, tolerance = 64 * 42, 128, 16, 0.25
    key_factors = torch.full((1, 1, n, rank), 0.13)
    key_factors[..., 0] = 2.0**21
    bias = biases.RelativeBias(
        torch.full((1, 1, 1, 1), -(2.0**21)),
        torch.ones(1, 1, near),
        key_factors,
        torch.ones(1, rank, near),
    )
    allowed = tolerance * near * math.exp(0.13 * (rank - 1))
    of_tile = 2 * allowed / ((n - near) // 64)
    q, k = torch.ones(1, 1, 1, 16), torch.zeros(1, 1, n, 16)
    k[:, :, : n - near] = math.log(of_tile / 64) / 4
    with torch.no_grad():
        cache = KVCache(1, 1, 16)
        biased_flash_attn_with_kvcache(q, cache, k, k, bias, tolerance=tolerance, backend="triton")
    (selection,) = selections
    skipped = n // 64 - int(selection.counts)
    assert allowed - 2 * of_tile < skipped * of_tile <= allowed


@pytest.mark.parametrize("tile", [6, 7])  # both places in a page
@pytest.mark.parametrize("place", [0, 63])  # in each of the two blocks of distances of the tile
@pytest.mark.parametrize("factor", [15.0, torch.inf])
def test_one_product_of_a_key_and_a_distance_keeps_its_tile_alone(selections, tile, place, factor):
    n, key = 64 * 30 + 20, 64 * tile + place
    key_factors, key_tables = torch.zeros(1, 1, n, 2), torch.zeros(1, 2, n)
    key_factors[:, :, key] = factor
    key_tables[:, :, n - 1 - key] = 1.0
    bias = biases.RelativeBias(key_factors=key_factors, key_tables=key_tables)
    q, k = torch.ones(1, 1, 1, 16), torch.zeros(1, 1, n, 16)
    k[:, :, -128:] = 5.0
    with torch.no_grad():
        cache = KVCache(1, 1, 16, page_size=128)
        biased_flash_attn_with_kvcache(q, cache, k, k, bias, backend="triton")
    (selection,) = selections
    assert selection.lists[0, : int(selection.counts)].tolist() == [tile, 28, 29, 30]


def test_a_chunk_may_fill_a_ring(selections):
    """The chunk has one tile more than the ring: the first and the last have the same address."""
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
    last = selections[-1]
    assert last.counts.max() == last.max_tiles == last.lists.shape[1]
