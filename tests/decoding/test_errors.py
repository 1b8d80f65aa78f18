"""What decoding refuses: one error, which names the argument, and a cache that is as it was."""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn import KVCache, biased_flash_attn_with_kvcache, biases, operators
from biased_flash_attn.forms import Linear
from tests.support.lowered import LoweredTo

B, H, HKV, D, DV = 2, 4, 2, 8, 5
HELD = 20  # tokens in the cache before
Q, K, V = torch.randn(B, H, 3, D), torch.randn(B, HKV, 3, D), torch.randn(B, HKV, 3, DV)
NEEDS_GRADIENT = Q.clone().requires_grad_()


def sums(n: int, heads: int = H, batch: int = B) -> biases.CumulativeBias:
    return biases.CumulativeBias(-torch.rand(batch, heads, n))


def with_nan(n: int) -> biases.CumulativeBias:
    steps = torch.zeros(B, H, n)
    steps[1, 2, 1] = torch.nan
    return biases.CumulativeBias(steps)


def of_keys(n: int, heads: int = H, rank: int = 3, dtype=torch.float32) -> biases.RelativeBias:
    factors = torch.randn(B, heads, n, rank, dtype=dtype)
    return biases.RelativeBias(
        key_factors=factors, key_tables=torch.randn(heads, rank, 9, dtype=dtype)
    )


class LoweredToSums:
    def lower(self, geometry, dtype, device):
        return sums(geometry.n_key).lower(geometry, dtype, device)


WRONG = {
    "no cache": (TypeError, "cache is a Tensor; it must be a KVCache", {"cache": K}),
    "k without v": (ValueError, "k is given and v is None; new tokens need both", {"v": None}),
    "v without k": (ValueError, "v is given and k is None; new tokens need both", {"k": None}),
    "q of another dtype": (
        TypeError,
        "q is torch.float64; the cache holds torch.float32, and must have been created with dtype",
        {"q": Q.double(), "k": K.double(), "v": V.double()},
    ),
    "q alone of another dtype": (
        TypeError,
        "q is torch.bfloat16; the cache holds torch.float32",
        {"q": Q.bfloat16(), "k": None, "v": None},
    ),
    "k of another dtype": (TypeError, "k is torch.float16 and q is", {"k": K.half()}),
    "q on another device": (
        ValueError,
        "q is on meta; the cache is on cpu",
        {"q": Q.to("meta"), "k": K.to("meta"), "v": V.to("meta")},
    ),
    "another batch": (
        ValueError,
        "q has batch 1; that of the cache is 2",
        {"q": Q[:1], "k": K[:1], "v": V[:1]},
    ),
    "k of other heads": (
        ValueError,
        "k has 1 heads; the cache has 2",
        {"k": K[:, :1], "v": V[:, :1]},
    ),
    "heads do not divide": (
        ValueError,
        "k has 2 heads; their number must divide that of q, 3",
        {"q": Q[:, :3]},
    ),
    "heads of q alone do not divide": (
        ValueError,
        "q has 3 heads; the cache has 2, which must divide it",
        {"q": Q[:, :3], "k": None, "v": None},
    ),
    "another head_dim": (
        ValueError,
        "q has head_dim 7; the cache has 8",
        {"q": Q[..., :7], "k": K[..., :7]},
    ),
    "another value_dim": (ValueError, "v has head_dim 4; the cache has 5", {"v": V[..., :4]}),
    "another length of v": (ValueError, "v has shape", {"v": V[:, :, :2]}),
    "k with three dimensions": (ValueError, "k has shape", {"k": K[0]}),
    "scale": (ValueError, "scale is inf", {"scale": float("inf")}),
    "tolerance": (ValueError, "tolerance is 1", {"tolerance": 1}),
    "backend": (ValueError, "backend is 'gpu'", {"backend": "gpu"}),
    "bias is a tensor": (TypeError, "bias is a Tensor", {"bias": torch.zeros(3, 20)}),
    "bias is for other heads": (ValueError, "bias is for 8 heads", {"bias": biases.Type1(8)}),
    "bias has NaN": (
        ValueError,
        "bias: its table values contain NaN",
        {"bias": biases.DistanceBias.from_function(lambda d: torch.sqrt(-d) - d.log(), H)},
    ),
    "bias has infinity": (
        ValueError,
        "bias: its table values contain inf; they must be finite, or -inf to hide keys",
        {"bias": biases.DistanceBias.from_function(lambda d: -d.log(), H)},
    ),
    "bias is lowered to sums": (
        ValueError,
        "bias has steps, but the cache was filled with a bias without them",
        {"bias": LoweredToSums()},
    ),
    "steps where there were none": (
        ValueError,
        "bias has steps, but the cache was filled with a bias without them",
        {"bias": sums(3)},
    ),
    "key factors where there were none": (
        ValueError,
        "bias has key factors, but the cache was filled with a bias without them",
        {"bias": of_keys(3)},
    ),
    "q needs gradients": (
        ValueError,
        r"q requires gradients, but decoding has no backward pass; call it under",
        {"q": NEEDS_GRADIENT},
    ),
    "bias needs gradients": (
        ValueError,
        "bias requires gradients",
        {"bias": biases.KerpleLog(H)},
    ),
}

WRONG_WITH_SUMS = {
    "no steps": (ValueError, "the cache was filled with a bias with steps; this bias has none", {}),
    "too many steps": (
        ValueError,
        "steps has length 4; it must be the number of keys, 3",
        {"bias": sums(4)},
    ),
    "steps of other heads": (ValueError, "bias is for 2 heads", {"bias": sums(3, heads=2)}),
    "sums of other heads": (
        ValueError,
        "bias has steps of 2 heads and torch.float64; the cache holds those of 4 heads and",
        {"q": Q[:, :2], "bias": sums(3, heads=2)},
    ),
    "steps of another batch": (ValueError, "bias has batch 3", {"bias": sums(3, batch=3)}),
    "steps are NaN": (ValueError, "bias: its steps contain NaN", {"bias": with_nan(3)}),
    "steps need gradients": (
        ValueError,
        "bias requires gradients",
        {"bias": biases.CumulativeBias(torch.zeros(B, H, 3, requires_grad=True))},
    ),
}


WRONG_WITH_FACTORS = {
    "no factors": (
        ValueError,
        "the cache was filled with a bias with key factors; this bias has none",
        {"bias": biases.RelativeBias(torch.randn(B, H, 3, 2), torch.randn(1, 2, 9))},
    ),
    "steps": (
        ValueError,
        "bias has steps, but the cache was filled with a bias without them",
        {"bias": sums(3)},
    ),
    "factors of all keys": (
        ValueError,
        r"lowered to shape \(2, 4, 23, 3\); it must be \(B or 1, H or 1, 3, 3\)",
        {"bias": of_keys(HELD + 3)},
    ),
    "factors of another rank": (
        ValueError,
        "bias has key factors of 4 heads, rank 2 and torch.float32; the cache holds those of 4"
        " heads, rank 3 and torch.float32",
        {"bias": of_keys(3, rank=2)},
    ),
    "factors of another dtype": (
        ValueError,
        "bias has key factors of 4 heads, rank 3 and torch.bfloat16; the cache holds those of",
        {"bias": of_keys(3, dtype=torch.bfloat16)},
    ),
    "factors are NaN": (
        ValueError,
        "bias: its key factors contain NaN",
        {
            "bias": biases.RelativeBias(
                key_factors=torch.full((B, H, 3, 3), torch.nan), key_tables=torch.randn(H, 3, 9)
            )
        },
    ),
}


def filled(bias=None, **options) -> KVCache:
    cache = KVCache(B, HKV, D, DV, **options)
    k, v = torch.randn(B, HKV, HELD, D), torch.randn(B, HKV, HELD, DV)
    q = torch.randn(B, H, 0, D)
    biased_flash_attn_with_kvcache(q, cache, k, v, bias)
    return cache


def state(cache: KVCache) -> list:
    """All that a cache holds, and what the next step is to give."""
    parts = [list(cache.lengths)]
    for b, length in enumerate(cache.lengths):
        page, row = cache.table.find(torch.tensor(b), torch.arange(length))
        parts += [x[page, :, row] for x in (cache.k, cache.v, cache.state) if x is not None]
    parts.append(None if cache.last_state is None else cache.last_state.clone())
    return parts


def assert_as_before(cache: KVCache, before: list) -> None:
    for now, then in zip(state(cache), before, strict=True):
        same = torch.equal(now, then) if isinstance(now, torch.Tensor) else now == then
        assert same


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("held", "error", "message", "arguments"),
    [
        *((None, *case) for case in WRONG.values()),
        *((sums(HELD), *case) for case in WRONG_WITH_SUMS.values()),
        *((of_keys(HELD), *case) for case in WRONG_WITH_FACTORS.values()),
    ],
    ids=[*WRONG, *WRONG_WITH_SUMS, *WRONG_WITH_FACTORS],
)
def test_invalid_arguments_are_refused(held, error, message, arguments, backend):
    cache = filled(held)
    before = state(cache)
    call = {"q": Q, "cache": cache, "k": K, "v": V, "backend": backend} | arguments
    with pytest.raises(error, match=message):
        biased_flash_attn_with_kvcache(**call)
    assert_as_before(cache, before)


def test_infinity_is_refused_in_tables_alone():
    """An infinite slope saturates, which hides all keys but the nearest one."""
    bias = LoweredTo(Linear(torch.full((1, H), torch.inf)))
    o = biased_flash_attn_with_kvcache(Q, filled(), K, V, bias, tolerance=0.0)
    assert torch.equal(o, V.repeat_interleave(H // HKV, 1))


FULL = {
    "its own pages": {"page_size": 16, "pages": 4},
    "a table's columns": {
        "page_size": 16,
        "pages": 4,
        "block_table": torch.tensor([[3, 0], [1, 2]]),
    },
    "a table's pages": {
        "page_size": 16,
        "pages": 9,
        "block_table": torch.tensor([[3, 0, 7], [1, 2, -1]]),
    },
}
MESSAGES = {
    "its own pages": "2 more pages of 16 keys are needed, and of its 4 pages 0 are free",
    "a table's columns": "sequence 0 would have 33 keys, and block_table has 2 columns of 16",
    "a table's pages": r"block_table\[1, 2\] is -1, but sequence 1 needs a page there",
}


@pytest.mark.parametrize("how", FULL)
def test_a_full_cache_is_refused(how):
    cache = filled(**FULL[how])
    room = 2 * 16 - HELD
    k, v = torch.randn(B, HKV, room + 1, D), torch.randn(B, HKV, room + 1, DV)
    before = state(cache)
    with pytest.raises(ValueError, match=f"cache is full: .*{MESSAGES[how]}"):
        biased_flash_attn_with_kvcache(Q, cache, k, v)
    assert_as_before(cache, before)
    biased_flash_attn_with_kvcache(Q, cache, k[:, :, 1:], v[:, :, 1:])
    assert cache.lengths == [32, 32]


@pytest.mark.parametrize("bias", [sums, of_keys])
@pytest.mark.parametrize("window", [None, 17])
def test_a_failed_step_leaves_the_cache_unchanged(monkeypatch, window, bias):
    """After tokens were written and before they are part of the sequences."""
    cache = filled(bias(HELD), window=window, page_size=16)
    before = state(cache) if window is None else list(cache.lengths)
    twin = filled(bias(HELD), window=window, page_size=16)
    for name in ("k", "v", "state", "last_state"):
        getattr(twin, name).copy_(getattr(cache, name))
    twin.bounds, twin.table.entries = cache.bounds, cache.table.entries.clone()

    def fail(*arguments):
        raise MemoryError

    step = (Q, cache, K, V, bias(3))
    with monkeypatch.context() as patch:
        patch.setattr(operators, "decode", fail)
        with pytest.raises(MemoryError):
            biased_flash_attn_with_kvcache(*step, backend="cpu")
    if window is None:
        assert_as_before(cache, before)
    assert cache.lengths == [HELD, HELD]
    after = biased_flash_attn_with_kvcache(*step)
    assert torch.equal(after, biased_flash_attn_with_kvcache(Q, twin, *step[2:]))


LENGTHS = {
    "a float": (TypeError, "lengths is 3.0; it must be an int", 3.0),
    "too few": (ValueError, r"lengths has 1 entries; it must have 2", [3]),
    "too long": (ValueError, r"lengths\[1\] is 21; it may be 0 to 20", [20, 21]),
    "negative": (ValueError, r"lengths\[0\] is -1; it may be 0 to 20", -1),
}


@pytest.mark.parametrize(("error", "message", "lengths"), LENGTHS.values(), ids=LENGTHS)
def test_invalid_lengths_are_refused(error, message, lengths):
    cache = filled()
    before = state(cache)
    with pytest.raises(error, match=message):
        cache.truncate(lengths)
    assert_as_before(cache, before)


def test_a_sliding_cache_refuses_too_many_old_queries():
    cache = filled(window=30, page_size=16)
    q = torch.randn(B, H, 60, D)
    with pytest.raises(
        ValueError, match="q has 60 queries; with 3 new tokens and window 30 it may"
    ):
        biased_flash_attn_with_kvcache(q, cache, K, V)
    assert cache.lengths == [HELD, HELD]
