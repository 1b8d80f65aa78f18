"""flash_attn_with_kvcache follows the documentation of flash-attn, in the caller's tensors."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from biased_flash_attn import operators
from biased_flash_attn.compat import flash_attn_func, flash_attn_kvcache, flash_attn_with_kvcache
from tests.compat.flash_attn_cases import (
    FlashCase,
    FlashProblem,
    Mask,
    Slopes,
    by_documentation,
    documented,
)
from tests.support.cases import pairwise
from tests.support.numerics import assert_close_to_float64
from tests.support.problems import magnitudes

BATCH, MAX_KEYS = 3, 150  # of a sequence


@dataclass(frozen=True)
class Cached:
    """A call up to its random numbers."""

    n_query: int
    n_new: int | None = None
    storage: str = "contiguous"
    leftpad: bool = False
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    alibi: str | None = None
    rotary: str | None = None
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        parts = (self.storage, self.rotary, "leftpad" * self.leftpad, "causal" * self.causal)
        sizes = (self.n_query, self.n_new, *self.window_size, *self.heads, *self.dims)
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join(map(str, filter(None, (dtype, *sizes, *parts, self.alibi))))


@dataclass
class Storage:
    """A cache, and the entry and row of each key of each sequence."""

    k: Tensor
    v: Tensor
    entry: Tensor  # (BATCH, MAX_KEYS)
    row: Tensor
    arguments: dict[str, Tensor]


def storage(case: Cached) -> Storage:
    """A cache without keys, filled with NaN."""
    kv_heads, (dim, value_dim) = case.heads[1], case.dims
    keys = torch.arange(MAX_KEYS)

    def unset(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=case.dtype)

    if case.storage.startswith("pages"):
        size = int(case.storage.removeprefix("pages"))
        columns = -(-MAX_KEYS // size)
        pages = BATCH * columns + 2
        table = torch.randperm(pages)[: BATCH * columns].view(BATCH, columns)
        k, v = (unset(pages, size, kv_heads, n) for n in case.dims)
        entry = table[:, keys // size]
        return Storage(k, v, entry, (keys % size).expand(BATCH, -1), {"block_table": table.int()})
    entry, arguments = torch.arange(BATCH), {}
    k, v = (unset(BATCH, MAX_KEYS, kv_heads, n) for n in case.dims)
    if case.storage == "indexed":
        entry = torch.randperm(BATCH + 4)[:BATCH]
        arguments = {"cache_batch_idx": entry.int()}
        k, v = (unset(BATCH + 4, MAX_KEYS, kv_heads, n) for n in case.dims)
    elif case.storage == "sliced":
        k, v = (unset(BATCH, MAX_KEYS + 9, kv_heads, n)[:, 5 : MAX_KEYS + 5] for n in case.dims)
    elif case.storage == "together":
        both = unset(BATCH, MAX_KEYS, kv_heads, dim + value_dim)
        k, v = both.split(case.dims, -1)
    return Storage(k, v, entry[:, None].expand(-1, MAX_KEYS), keys.expand(BATCH, -1), arguments)


def rotated(x: Tensor, tables: tuple[Tensor, Tensor], at: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x (n, heads, D), a product of complex numbers."""
    cos, sin = (table[at].to(torch.promote_types(x.dtype, torch.float32)) for table in tables)
    r = cos.shape[1]
    pairs = x[..., : 2 * r].to(cos.dtype)
    pairs = pairs.unflatten(-1, (r, 2)) if interleaved else pairs.unflatten(-1, (2, r)).mT
    rotated = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin)[:, None]
    rotated = torch.view_as_real(rotated)
    rotated = rotated.flatten(-2) if interleaved else rotated.mT.flatten(-2)
    return torch.cat([rotated.to(x.dtype), x[..., 2 * r :]], -1)


def check(case: Cached) -> None:
    """Checks what a call returns and what it writes."""
    (heads, kv_heads), (dim, value_dim), dtype = case.heads, case.dims, case.dtype
    n_new = case.n_new or 0
    before = torch.randint(0, MAX_KEYS - max(n_new, case.n_query) + 1, (BATCH,))
    if case.n_new is None:
        before[0] = MAX_KEYS
    begin = (before * torch.rand(BATCH)).long() * case.leftpad
    held = storage(case)
    q, k, v = (
        torch.randn(BATCH, n, h, channels).to(dtype)
        for n, h, channels in (
            (case.n_query, heads, dim),
            (n_new, kv_heads, dim),
            (n_new, kv_heads, value_dim),
        )
    )
    old_k, old_v = (torch.randn(BATCH, MAX_KEYS, kv_heads, n).to(dtype) for n in case.dims)
    for b in range(BATCH):
        used = slice(int(begin[b]), int(before[b]))
        at = held.entry[b, used], held.row[b, used]
        held.k[at], held.v[at] = old_k[b, used], old_v[b, used]
    was_k, was_v = held.k.clone(), held.v.clone()
    if "block_table" in held.arguments:  # entries for pages without keys are undefined
        table, size = held.arguments["block_table"], held.k.shape[1]
        first_key = torch.arange(table.shape[1]) * size
        table[first_key >= before[:, None] + n_new] = random.choice([-1, 2**31 - 1])

    options = {"causal": case.causal, "window_size": case.window_size}
    shape = {None: None, "heads": (heads,), "batch": (BATCH, heads)}[case.alibi]
    slopes = None if shape is None else 0.3 * torch.rand(shape)
    tables = None
    if case.rotary:
        angles = 6 * torch.rand(
            MAX_KEYS + max(n_new, case.n_query), random.choice([1, 4, dim // 2])
        )
        tables = angles.cos().to(dtype), angles.sin().to(dtype)
        options |= {"rotary_cos": tables[0], "rotary_sin": tables[1]}
        options["rotary_interleaved"] = case.rotary == "interleaved"
    if case.leftpad:
        options["cache_leftpad"] = begin.int()
    if case.n_new is not None:
        options |= {"k": k, "v": v}
    out, lse = flash_attn_with_kvcache(
        q,
        held.k,
        held.v,
        cache_seqlens=before.int(),
        alibi_slopes=slopes,
        return_softmax_lse=True,
        **options,
        **held.arguments,
    )
    assert out.is_contiguous()

    for b in range(BATCH):
        at_new = int(before[b]) + torch.arange(n_new)
        moves = case.causal or case.window_size != (-1, -1)
        at_query = int(before[b]) + torch.arange(case.n_query) * moves
        new = held.entry[b, at_new], held.row[b, at_new]
        results = []
        for real in (torch.float64, dtype):
            q_b, k_b, v_b = (x[b].to(real) for x in (q, k, v))
            if tables is not None:
                q_b, k_b = (
                    rotated(x, tables, at, case.rotary == "interleaved")
                    for x, at in ((q_b, at_query), (k_b, at_new))
                )
            rows = slice(int(begin[b]), int(before[b]))
            k_b, v_b = (
                torch.cat([x[b, rows].to(real), y]) for x, y in ((old_k, k_b), (old_v, v_b))
            )
            own = (
                None if slopes is None else slopes.view(-1, heads)[b % len(slopes.view(-1, heads))]
            )
            results.append(problem_of(case, q_b, k_b, v_b, own))
        exact, naive = results
        sums = magnitudes(exact, dtype)
        truth, baseline = by_documentation(exact), by_documentation(naive)
        ours = out[b].transpose(0, 1)[None], lse[b][None]
        for name, a, x, y in zip(("o", "lse"), ours, truth, baseline, strict=True):
            assert_close_to_float64(a, x, y, name, sums[name])
        written = exact.k[0, :, exact.k.shape[2] - n_new :].transpose(0, 1)
        same = naive.k[0, :, exact.k.shape[2] - n_new :].transpose(0, 1)
        # Each channel is a sum of two of k, times a sine or a cosine.
        terms = 2 * k[b].abs().amax(-1, keepdim=True)
        assert_close_to_float64(held.k[new], written, same, "k in the cache", terms)
        assert torch.equal(held.v[new], v[b])
        was_k[new], was_v[new] = held.k[new], held.v[new]
    for now, then in ((held.k, was_k), (held.v, was_v)):
        assert torch.equal(now.nan_to_num(nan=7), then.nan_to_num(nan=7))


def problem_of(case: Cached, q, k, v, slopes: Tensor | None) -> FlashProblem:
    """The attention of one sequence: q (n, H, D), k and v its keys."""
    bias = None
    if slopes is not None:
        bias = Slopes(case.heads[0])
        bias.slopes.data = slopes.to(torch.promote_types(q.dtype, torch.float32))
    of_call = FlashCase(
        lengths=(len(q), len(k)),
        dims=case.dims,
        heads=case.heads,
        batch=1,
        causal=case.causal,
        window_size=case.window_size,
    )
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    grads = torch.zeros_like(q[..., :1]).expand(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3])
    return FlashProblem(of_call, q, k, v, bias, *grads)


STORAGES = ["contiguous", "indexed", "sliced", "together", "pages16", "pages50", "pages128"]
COMBINATIONS = pairwise(
    n_query=[1, 3, 17, 130],
    n_new=[None, 0, 1, 17],
    storage=STORAGES,
    leftpad=[False, True],
    causal=[False, True],
    window_size=[(-1, -1), (30, -1), (20, 0), (9, 4), (-1, 2)],
    alibi=[None, "heads", "batch"],
    heads=[(4, 4), (4, 2), (6, 1)],
    dims=[(16, 16), (17, 8), (64, 64)],
    dtype=[torch.float32, torch.bfloat16],
)


@pytest.mark.parametrize("case", [Cached(**row) for row in COMBINATIONS], ids=str)
def test_every_pair_of_settings(case):
    check(case)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("rotary", ["interleaved", "halves"])
@pytest.mark.parametrize(
    "positions",
    [{"causal": True}, {"window_size": (40, 3)}, {}, {"causal": True, "leftpad": True}],
    ids=str,
)
def test_rotary_embedding(positions, rotary, storage):
    check(Cached(5, random.choice([1, 5, 7]), storage, rotary=rotary, **positions))


@pytest.mark.parametrize("storage", ["contiguous", "indexed", "sliced", "pages50"])
def test_one_token_does_not_copy_the_cache(storage, monkeypatch):
    """Keys are read from the memory of the caller's tensors."""
    seen = []
    decode = operators.decode

    def noted(problem):
        seen.append((problem.k.data_ptr(), problem.v.data_ptr()))
        return decode(problem)

    monkeypatch.setattr(flash_attn_kvcache.operators, "decode", noted)
    case = Cached(1, 1, storage)
    held = globals()["storage"](case)
    held.k.zero_(), held.v.zero_()
    x = torch.randn(BATCH, 1, 2, 16)
    flash_attn_with_kvcache(
        x.repeat(1, 1, 2, 1), held.k, held.v, x, x, cache_seqlens=9, **held.arguments
    )
    assert seen == [(held.k.data_ptr(), held.v.data_ptr())]


@pytest.mark.parametrize("n_query", [1, 5, 130])
@pytest.mark.parametrize("window_size", [(-1, -1), (-1, 0), (600, 40)], ids=str)
def test_long_caches_are_not_skipped(n_query, window_size):
    """There are enough keys for skipping."""
    length, begin = random.randint(1100, 1400), random.randint(0, 60)
    q, slopes = torch.randn(2, n_query, 4, 8), 0.02 * torch.rand(4)
    k_cache, v_cache = torch.randn(2, 2, 1500, 2, 8)
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=length,
        cache_leftpad=torch.full((2,), begin, dtype=torch.int32),
        window_size=window_size,
        alibi_slopes=slopes,
        return_softmax_lse=True,
    )
    mask = Mask(n_query, length - begin, False, window_size)
    own = (x[:, begin:length].double() for x in (k_cache, v_cache))
    exact = documented(q.double(), *own, mask, 8**-0.5, slopes)
    for ours, truth in zip((out, lse), exact, strict=True):
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_query", [1, 130])
def test_autocast_preserves_the_dtype_of_the_cache(n_query):
    q, cache = torch.randn(2, n_query, 4, 8), torch.randn(2, 2, 20, 2, 8)
    expected = flash_attn_with_kvcache(q, *cache, cache_seqlens=13)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flash_attn_with_kvcache(q, *cache, cache_seqlens=13), expected)


def test_steps_equal_one_call():
    """Token by token, with lengths counted by the caller, as documented."""
    q, k, v = torch.randn(2, 40, 4, 16), *torch.randn(2, 2, 40, 2, 16)
    slopes = torch.rand(4)
    k_cache, v_cache = torch.full((2, 2, 64, 2, 16), torch.nan)
    outs = [
        flash_attn_with_kvcache(
            q[:, n : n + 1],
            k_cache,
            v_cache,
            k[:, n : n + 1],
            v[:, n : n + 1],
            cache_seqlens=n,
            causal=True,
            alibi_slopes=slopes,
        )
        for n in range(40)
    ]
    whole = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(torch.cat(outs, 1), whole)
    full = flash_attn_with_kvcache(q, k, v, causal=True, alibi_slopes=slopes)
    torch.testing.assert_close(full, whole)
