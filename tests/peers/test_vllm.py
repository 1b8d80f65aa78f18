"""vLLM, tests/kernels/attention/test_cpu_attn.py: paged caches, ALiBi, windows and sinks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from biased_flash_attn.compat import flash_attn_varlen_func, flash_attn_with_kvcache
from biased_flash_attn.validation import MAX_HEAD_DIM

from .counting import sampled
from .oracle import assert_near, attention

PEER = ("vLLM", "tests/kernels/attention/test_cpu_attn.py")
CAPPED = "capped logits"
EIGHT_BITS = "keys and values with 8 bits"
WIDE = f"heads wider than {MAX_HEAD_DIM}"
PAGES = 64  # of the cache; their 1024 hold no more that matters, as tables repeat pages in both


@dataclass(frozen=True)
class Case:
    test: str
    lengths: tuple[tuple[int, int], ...]  # the queries and keys of each sequence
    heads: tuple[int, int]
    dim: int
    page: int
    window: int | None
    dtype: torch.dtype
    cache: str = "auto"

    def __str__(self) -> str:
        dtype, n = str(self.dtype).removeprefix("torch."), len(self.lengths)
        parts = (self.test, f"{n}sequences", self.heads, self.dim, f"page{self.page}")
        return "-".join(map(str, (*parts, f"window{self.window}", dtype)))

    @property
    def refused(self) -> str:
        if self.cache != "auto":
            return EIGHT_BITS
        if self.test == "softcap":
            return CAPPED
        return WIDE if self.dim > MAX_HEAD_DIM else ""

    @property
    def slow(self) -> bool:
        return self.test == "encoder" and self.window is None


HEADS = ((4, 4), (8, 2), (9, 3))
WINDOWS = (None, 256)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LENGTHS = (
    ((1, 213), (1, 1), (1, 312), (1, 7), (1, 7812)),
    ((2345, 2345), (5, 5), (3, 16), (134, 5131)),
    ((992, 2456), (1, 1234), (98, 1145), (1, 4162), (2345, 2345)),
)
TOKENS = tuple((n, n) for n in (1, 678, 2367, 145, 4162, 36, 7812))


def cases() -> Iterator[Case]:
    def of(test, *options, lengths=LENGTHS, dtypes=(torch.bfloat16,), caches=("auto",)):
        """Options: the dims and sizes of pages."""
        for parts in itertools.product(lengths, HEADS, *options, WINDOWS, dtypes, caches):
            yield Case(test, *parts)

    dims, eight = (96, 128, 512), "fp8_e4m3"
    yield from of("encoder", dims, (128,), lengths=(TOKENS,), dtypes=DTYPES)
    yield from of("paged", dims, (96, 128), dtypes=DTYPES, caches=("auto", eight, "fp8_e5m2"))
    yield from of("paged_vec16", (96, 80, 112, 128), (48,))
    for test in ("softcap", "alibi", "sink"):
        yield from of(test, (96,), (128,), caches=("auto", eight))


CASES = [*cases()]


def alibi_slopes(heads: int) -> Tensor:
    """2^(-8 n / p) for the first p heads, the largest power of 2, and 2^(-4 (2 n - 1) / p) for
    others, n from 1 on in both."""
    p = 1 << (heads.bit_length() - 1)
    n = torch.arange(1, p + 1)
    return torch.exp2(torch.cat([-8 * n / p, -4 * (2 * n - 1) / p])[:heads])


def compared(n: int) -> Tensor:
    """The queries of a sequence whose results are compared, the first and the last among them."""
    return torch.linspace(0, n - 1, min(n, 24)).long()


def naive(case: Case, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, sink: Tensor) -> Tensor:
    """q (n, H, D) of one sequence, k and v (m, Hkv, D); a sink is a key with a value of 0."""
    rows = compared(len(q))
    distance = rows[:, None] + len(k) - len(q) - torch.arange(len(k))
    both = case.test == "encoder"
    hidden = (distance < 0) & (not both)
    if case.window is not None:
        hidden = hidden | ((distance.abs() if both else distance) >= case.window)
    added = torch.zeros(case.heads[0], *distance.shape, dtype=torch.float64)
    if case.test == "alibi":
        added = -slopes.double()[:, None, None] * distance
    added = added.masked_fill(hidden, -torch.inf)
    q, k, v = (x.transpose(0, 1) for x in (q[rows], k, v))
    if case.test == "sink":
        added = torch.cat([added, sink.double().view(-1, 1, 1).expand(-1, len(rows), 1)], -1)
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    return attention(q, k, v, added, case.dim**-0.5).transpose(0, 1)


def by_pages(case: Case, q: Tensor, pages, table: Tensor, slopes: Tensor, sink: Tensor) -> Tensor:
    """One call for all consecutive sequences with equally many queries."""
    outputs, first = [], 0
    if case.page == 96:  # two pages of 48 keys: larger ones have to be multiples of 64
        pages = [x.unflatten(1, (2, -1)).flatten(0, 1) for x in pages]
        table = torch.stack([2 * table, 2 * table + 1], -1).flatten(1)
    for n, group in itertools.groupby(enumerate(case.lengths), lambda x: x[1][0]):
        sequences, lengths = zip(*group, strict=True)
        q_b = q[first : first + n * len(sequences)].unflatten(0, (-1, n))
        first += n * len(sequences)
        o, lse = flash_attn_with_kvcache(
            q_b,
            *pages,
            cache_seqlens=torch.tensor([m for _, m in lengths], dtype=torch.int32),
            block_table=table[list(sequences)],
            causal=True,
            window_size=(-1, -1) if case.window is None else (case.window - 1, 0),
            alibi_slopes=slopes if case.test == "alibi" else None,
            return_softmax_lse=True,
        )
        if case.test == "sink":
            weight = torch.sigmoid(lse - sink.float()[:, None])
            o = o * weight.transpose(1, 2)[..., None].to(o.dtype)
        outputs.append(o.flatten(0, 1))
    return torch.cat(outputs)


def by_packing(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lengths = [n for n, _ in case.lengths]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    window = (-1, -1) if case.window is None else (case.window - 1,) * 2
    most = max(lengths)
    return flash_attn_varlen_func(q, k, v, starts, starts, most, most, window_size=window)


SERVED = sampled(CASES, "vllm", alone="test")


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.slow] * x.slow, id=str(x)) for x in SERVED]
)
def test_attention(case):
    """The error of each sequence is that of rounding the weights and the output, which is less than
    the tolerance of the peer, 0.015 + 0.01 |o|; in float32 that of the logits is larger."""
    heads, kv_heads = case.heads
    n_queries, n_keys = ([*x] for x in zip(*case.lengths, strict=True))
    stored = (sum(n_keys),) if case.test == "encoder" else (PAGES, case.page)
    shapes = [(sum(n_queries), heads), *[(*stored, kv_heads)] * 2]
    q, *kv = (torch.randn(*shape, case.dim).to(case.dtype) for shape in shapes)
    slopes, sink = alibi_slopes(heads), 15 * torch.rand(heads, dtype=torch.bfloat16)
    if case.test == "encoder":
        o, keys = by_packing(case, q, *kv), [x.split(n_keys) for x in kv]
    else:
        columns = -(-max(n_keys) // case.page)
        table = torch.randint(PAGES, (len(n_keys), columns), dtype=torch.int32)
        o = by_pages(case, q, kv, table, slopes, sink)
        rows = [*zip(table, n_keys, strict=True)]
        keys = [[x[row].flatten(0, 1)[:n] for row, n in rows] for x in kv]
    ratio = torch.finfo(case.dtype).eps * (8 if case.dtype == torch.float32 else 1)
    sequences = zip(q.split(n_queries), *keys, o.split(n_queries), strict=True)
    for *qkv, actual in sequences:
        exact = naive(case, *(x.double() for x in qkv), slopes, sink)
        n, m = len(qkv[0]), len(qkv[1])
        assert_near(actual[compared(n)], exact, ratio, f"{n} queries and {m} keys")


Q = torch.randn(1, 1, 4, 8).half()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2])
def test_caches_with_8_bits_are_refused(dtype):
    cache = torch.zeros(Q.shape).to(dtype)
    with pytest.raises(TypeError, match=rf"k_cache is {dtype}; it may be float64, float32, bf"):
        flash_attn_with_kvcache(Q, cache, cache)


def test_capped_logits_are_refused():
    with pytest.raises(ValueError, match=r"softcap is 50; it must be 0"):
        flash_attn_with_kvcache(Q, Q, Q, softcap=50)


def test_wide_heads_are_refused():
    q = torch.zeros(1, 1, 4, MAX_HEAD_DIM + 1)
    with pytest.raises(ValueError, match=rf"q has head_dim {MAX_HEAD_DIM + 1}; it may be 1 to"):
        flash_attn_with_kvcache(q, q, q)


def test_pages_that_have_to_be_divided_are_refused():
    cache = torch.zeros(2, 96, *Q.shape[2:]).half()
    with pytest.raises(ValueError, match=r"k_cache has pages of 96 keys; they may have 1 to 64"):
        flash_attn_with_kvcache(Q, cache, cache, block_table=torch.zeros(1, 2, dtype=torch.int32))
