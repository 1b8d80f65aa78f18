"""Decoding step by step with a cache gives what one call over the whole sequence gives."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biased_flash_attn import KVCache, backends, biased_flash_attn_with_kvcache, biases
from tests.decoding.cases import (
    STORAGES,
    bias_at,
    bias_of,
    check_decoding,
    chunks,
    decoded,
    make_cache,
    sequence,
)
from tests.support.biases import FORMS, SHIPPED, Lowered, of_rows
from tests.support.cases import DTYPES, INSTRUCTION_SETS, LAYOUTS, Case, pairwise
from tests.support.problems import drawn

TOKENS = 150
SIZES = [(1,), (3,), (64,), (130, 1, 1, 17, 1)]
HEADS = [(4, 4), (4, 2), (6, 1)]


def case_of(bias: str, length: int = TOKENS, **settings) -> Case:
    return Case(bias, lengths=(length, length), **settings)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("bias", [*SHIPPED, *FORMS])
def test_steps_equal_one_call(bias, backend):
    factors = {
        "dtype": [torch.float32, torch.bfloat16],
        "sizes": SIZES if backend == "cpu" else [(40,), (130, 1, 1, 17, 1)],
        "window": [None, 50],
        "storage": STORAGES,
        "heads": HEADS,
    }
    for row in pairwise(**factors):
        sizes, storage = row.pop("sizes"), row.pop("storage")
        problem = drawn(case_of(bias, **row, dims=(16, 24)))
        o, lse = decoded(problem, make_cache(problem, storage), sizes, backend)
        check_decoding(problem, o, lse)


@pytest.mark.parametrize("bias", FORMS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_user_defined_biases_decode(bias, backend):
    """With enough keys that some are left out."""
    problem = drawn(case_of(bias, 1300, batch=1, heads=(2, 1), window=None))
    if bias.startswith("linear"):
        problem.bias.slopes.data.fill_(0.5)
    results = [
        decoded(problem, make_cache(problem, "contiguous"), (1200, 1, 99), backend, wrapped=wrapped)
        for wrapped in (lambda bias: bias, lambda bias: bias and Lowered(bias))
    ]
    for ours, exact in zip(*results, strict=True):
        assert torch.equal(ours, exact)


KERNELS = itertools.product(INSTRUCTION_SETS, DTYPES, FORMS)
SETTINGS = pairwise(
    dims=[(1, 1), (16, 5), (17, 16), (64, 64), (130, 96), (256, 256), (320, 257)],
    heads=[(1, 1), (2, 2), (4, 2), (17, 1)],
    window=[None, 1, 40],
    page_size=[16, 64, 128],
    layout=[*LAYOUTS],
    sizes=[(1,), (5, 40, 1)],
)


@pytest.mark.parametrize(
    ("isa", "dtype", "bias", "row"),
    [(*kernel, row) for kernel, row in zip(KERNELS, itertools.cycle(SETTINGS), strict=False)],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x),
)
def test_every_kernel_is_exact(isa, dtype, bias, row):
    """Each with the next combination of settings."""
    case = {name: row[name] for name in ("dims", "heads", "window", "layout")}
    problem = drawn(case_of(bias, 75, dtype=dtype, **case))
    with backends.instruction_set(isa):
        cache = make_cache(problem, "shuffled", row["page_size"])
        results = decoded(problem, cache, row["sizes"])
    check_decoding(problem, *results)


@pytest.mark.sanitize
@given(
    bias=st.sampled_from([*FORMS]),
    dtype=st.sampled_from(DTYPES),
    length=st.integers(1, 260),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 280),
    page_size=st.sampled_from([16, 32, 64, 256]),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (8, 2)]),
    storage=st.sampled_from(STORAGES[1:]),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_random_steps_equal_one_call(
    bias, dtype, length, sizes, window, page_size, heads, storage, threads, seed
):
    torch.manual_seed(seed)
    case = case_of(bias, length, dtype=dtype, window=window, heads=heads, dims=(9, 21))
    problem = drawn(case)
    torch.set_num_threads(threads)
    results = decoded(problem, make_cache(problem, storage, page_size), sizes)
    check_decoding(problem, *results)


@pytest.mark.parametrize("bias", FORMS)
@pytest.mark.parametrize("window", [None, 70])
def test_sequences_of_different_lengths(bias, window):
    """Prompts are padded on the right; then the padding is dropped."""
    lengths, tokens = [5, 64, 131], 20
    problem = drawn(case_of(bias, max(lengths) + tokens, batch=3, heads=(4, 2), window=window))
    if window is not None:  # of which the padding would have overwritten the keys
        lengths = [100, 120, 131]
    cache = make_cache(problem, "contiguous")

    prompt = slice(0, max(lengths))
    append(problem, cache, prompt)
    cache.truncate(torch.tensor(lengths))
    last = []
    for step in range(tokens):
        at = [length + step for length in lengths]
        q, k, v = (
            torch.stack([x[b, :, i, None] for b, i in enumerate(at)])
            for x in (problem.q, problem.k, problem.v)
        )
        with torch.no_grad():
            bias_now = bias_at(problem, at)
            last.append(biased_flash_attn_with_kvcache(q, cache, k, v, bias_now, return_lse=True))
    assert cache.lengths == [length + tokens for length in lengths]
    o, lse = (torch.cat(parts, 2) for parts in zip(*last, strict=True))
    for b, length in enumerate(cache.lengths):
        alone = sequence(problem, b, length)
        whole = decoded(alone, make_cache(alone, "contiguous"), (length,), "reference")
        check_decoding(alone, *whole)
        of_prompt = (x[:, :, : length - tokens] for x in whole)
        check_decoding(
            alone,
            *(
                torch.cat([before, ours[b : b + 1]], 2)
                for before, ours in zip(of_prompt, (o, lse), strict=True)
            ),
        )


@pytest.mark.parametrize("bias", FORMS)
@pytest.mark.parametrize("storage", STORAGES)
def test_rejected_tokens_leave_no_trace(bias, storage):
    """Speculation: some tokens are appended and dropped again, and others take their places."""
    problem, wrong = (drawn(case_of(bias, 160, heads=(4, 2), window=w)) for w in (None, None))
    cache, results = make_cache(problem, storage), []
    for tokens in chunks(160, (50, 7, 1)):
        count = min(5, 160 - tokens.start)
        guess = slice(tokens.start, tokens.start + count)
        append(problem, cache, guess, of=wrong)
        cache.truncate(tokens.start)
        results.append(append(problem, cache, tokens))
    check_decoding(problem, *(torch.cat(parts, 2) for parts in zip(*results, strict=True)))


def test_tokens_are_rejected_while_a_sliding_cache_holds_the_window():
    problem = drawn(case_of("linear", 200, window=40))
    cache = make_cache(problem, "contiguous")
    results = []
    for tokens in chunks(200, (9,)):
        append(problem, cache, tokens)
        cache.truncate(tokens.start)
        results.append(append(problem, cache, tokens))
    check_decoding(problem, *(torch.cat(parts, 2) for parts in zip(*results, strict=True)))
    least = 200 - cache.table.keys + 40 - 1
    with pytest.raises(ValueError, match=rf"lengths\[0\] is 46; it may be 0, or {least} to 200"):
        cache.truncate(46)
    assert cache.lengths == [200, 200]
    cache.truncate([least, 0])
    append(problem, cache, slice(0, 30))
    cache.truncate([least, 20])
    assert cache.lengths == [least, 20]


@pytest.mark.parametrize("bias", FORMS)
def test_queries_without_new_tokens(bias):
    """The last queries again, and more or fewer of them than new tokens."""
    problem = drawn(case_of(bias, 150, heads=(4, 2)))
    cache = make_cache(problem, "paged")
    whole = append(problem, cache, slice(0, 150))
    for n_query in (1, 40, 150):
        last = slice(150 - n_query, 150)
        given = bias_of(problem, last)
        if isinstance(given, biases.CumulativeBias):
            given = biases.CumulativeBias(given.steps[..., :0], given.gain, given.kernel)
        if isinstance(given, biases.RelativeBias):
            given = of_rows(given, keys=slice(0, 0))
        with torch.no_grad():
            again = biased_flash_attn_with_kvcache(
                problem.q[:, :, last], cache, bias=given, return_lse=True
            )
        check_decoding(
            problem,
            *(torch.cat([x[:, :, : last.start], y], 2) for x, y in zip(whole, again, strict=True)),
        )
    assert cache.lengths == [150, 150]


def test_an_empty_cache_accepts_another_kind_of_bias():
    cache = KVCache(2, 2, 16, 24)
    for name in ("relative", "cumulative", "relative-keys", "none", "relative"):
        problem = drawn(case_of(name, 70, dims=(16, 24)))
        check_decoding(problem, *decoded(problem, cache, (60, 1)))
        cache.truncate(0)


def test_queries_before_the_first_key_are_empty():
    cache = KVCache(1, 2, 8)
    q, k, v = (torch.randn(1, 2, n, 8) for n in (5, 3, 3))
    for backend in ("cpu", "reference"):
        o, lse = biased_flash_attn_with_kvcache(q, cache, return_lse=True, backend=backend)
        assert_empty(o, lse)
        o, lse = biased_flash_attn_with_kvcache(q, cache, k, v, return_lse=True, backend=backend)
        assert_empty(o[:, :, :2], lse[:, :, :2])
        assert (lse[:, :, 2:] > -torch.inf).all()
        cache.truncate(0)
    o = biased_flash_attn_with_kvcache(q[:, :, :0], cache, k, v)
    assert o.shape == (1, 2, 0, 8)
    assert cache.lengths == [3]


def test_a_sliding_cache_uses_constant_memory():
    window, heads = 100, 2
    cache = KVCache(1, heads, 8, window=window)
    bias = biases.ALiBi(heads)
    x = torch.randn(1, heads, 7, 8)
    biased_flash_attn_with_kvcache(x, cache, x, x, bias)
    pages = set()
    for _ in range(1000):
        biased_flash_attn_with_kvcache(x, cache, x, x, bias)
        pages.add(cache.k.shape[0])
    assert cache.lengths == [7007]
    assert max(pages) * cache.k.shape[2] <= window + 4 * cache.k.shape[2]


def test_growth_copies_rarely_and_reuse_never():
    cache = KVCache(1, 1, 8, page_size=16)
    x = torch.randn(1, 1, 1, 8)
    places = set()
    for _ in range(2000):
        biased_flash_attn_with_kvcache(x, cache, x, x)
        places.add(cache.k.data_ptr())
    assert len(places) <= 9  # 1, 2, 4, ... pages up to 256
    cache.truncate(0)
    for _ in range(2000):
        biased_flash_attn_with_kvcache(x, cache, x, x)
    assert places >= {cache.k.data_ptr()}


@pytest.mark.parametrize("name", ["none", "linear", "distance", "cumulative-gain"])
def test_positions_are_exact_at_a_million_tokens(name):
    """A sliding cache that has seen a million tokens gives what it gives after none."""
    window, tokens, skipped = 60, 90, 2**20
    problem = drawn(case_of(name, tokens, batch=1, window=window))
    cache = make_cache(problem, "contiguous")
    steps = 0.7 * torch.rand(1, 2, 1024)
    x = torch.randn(1, 2, 1024, 16)
    for _ in range(skipped // 1024):
        before = problem.bias
        if "cumulative" in name:
            before = biases.CumulativeBias(steps, torch.ones(1, 2, 1024))
        with torch.no_grad():
            biased_flash_attn_with_kvcache(x[:, :, :0], cache, x, x, before)
    o, lse = decoded(problem, cache, (1, 5))
    assert cache.lengths == [skipped + tokens]
    fresh = make_cache(problem, "contiguous")
    whole = decoded(problem, fresh, (tokens,))
    check_decoding(problem, *whole)
    check_decoding(
        problem,
        *(
            torch.cat([x[:, :, :window], y[:, :, window:]], 2)
            for x, y in zip(whole, (o, lse), strict=True)
        ),
    )


def assert_empty(o, lse):
    assert (o == 0).all()
    assert (lse == -torch.inf).all()


def append(problem, cache, tokens: slice, of=None, **options):
    """o and lse of some tokens of a problem, or of another one with the same bias."""
    source = of or problem
    with torch.no_grad():
        return biased_flash_attn_with_kvcache(
            source.q[:, :, tokens],
            cache,
            source.k[:, :, tokens],
            source.v[:, :, tokens],
            bias_of(problem, tokens),
            return_lse=True,
            **options,
        )
