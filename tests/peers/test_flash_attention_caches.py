"""The cases of flash-attn's tests of caches: new keys, rotary embedding, pages and padding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from biased_flash_attn.compat import flash_attn_with_kvcache

from . import flash_attention
from .flash_attention import (
    BOTH,
    FEW_PAIRS,
    FILE,
    HEADS,
    naive_of_each,
    page_table,
    products,
    samples,
)
from .oracle import assert_within

PEER = ("flash-attn, caches", FILE)


@dataclass(frozen=True)
class Case(flash_attention.Case):
    """lengths: of the queries, and the most keys of a sequence in the cache."""

    batch = 2

    new: bool = False  # whether there are new keys,
    as_many: bool = True  # as many as queries
    rotary: float = 0.0  # the part of the channels that is rotated
    interleaved: bool = True
    page: int | None = None
    leftpad: bool = False
    num_splits: int = 0


SETTINGS = {
    "lengths": [
        *((1, 128), (1, 339), (3, 1024), (64, 800), (64, 256), (3, 799), (64, 2048), (16, 20000)),
        *((1, 128 * 1024), (16, 128 * 1024), (128, 128)),
    ],
    "dim": [32, 59, 64, 80, 128, 256],
    "dtype": [torch.float16],
    "causal": BOTH,
    "local": BOTH,
    "alibi": BOTH,
    "heads": ["mha", "mqa", "gqa"],
    "as_many": BOTH,
    "interleaved": BOTH,
    "num_splits": [1, 0],
}
# Only new keys are rotated, and only caches without pages have padding.
CASES = [
    case
    for new, rotary in ((False, [0.0]), (True, [0.0, 0.5, 1.0]))
    for page, leftpad in ((None, BOTH), (256, [False]))
    for case in products(
        Case, "kvcache", **SETTINGS, new=[new], rotary=rotary, page=[page], leftpad=leftpad
    )
]
BEYOND = [
    Case("bounds", (1, 256), 64, torch.float16, causal=False, new=new, page=256) for new in BOTH
]
SHORT = [case for case in CASES if case.pairs <= FEW_PAIRS]
# Caches of 128k keys take up to 400 MB for each head.
LONG = [
    case
    for case in CASES
    if case.pairs > FEW_PAIRS and (case.lengths[1] <= 20000 or case.heads == "mqa")
]
CASES += BEYOND


def cache_of(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """k and v, also in pages, whose table is the last."""
    n_key, tail = case.lengths[1], (HEADS[case.heads][1], case.dim)
    if case.page is None:
        shape, table = (case.batch, n_key, *tail), None
    else:
        table = page_table(case.batch, -(-n_key // case.page))
        shape = (table.numel(), case.page, *tail)
    return [torch.randn(shape).to(case.dtype) for _ in range(2)], table


def contents(cache: Tensor, table: Tensor | None, n_key: int) -> Tensor:
    """A copy of the keys or values of each sequence, (batch, n_key, heads, dim)."""
    rows = cache.clone() if table is None else cache[table.long()].flatten(1, 2)
    return rows[:, :n_key]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (batch, n, heads, dim) times e^(i angle) of positions (batch, n), where channels c and
    c + 1, or c and c + half, are a complex number."""
    half = cos.shape[1]
    parts = x[..., : 2 * half].double()
    parts = parts.unflatten(-1, (half, 2)) if interleaved else parts.unflatten(-1, (2, half)).mT
    factors = torch.complex(cos.double(), sin.double())[positions][:, :, None]
    parts = torch.view_as_real(torch.view_as_complex(parts.contiguous()) * factors)
    parts = parts if interleaved else parts.mT
    return torch.cat([parts.flatten(-2), x[..., 2 * half :].double()], -1).to(x.dtype)


def angles(case: Case, table: Tensor | None) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Cosines and sines for as many positions as the cache has, of a multiple of 16 channels."""
    half = int(case.rotary * case.dim) // 16 * 8
    if not half:
        return None, None
    positions = case.lengths[1] if table is None else table.numel() * case.page
    angle = 2 * math.pi * torch.rand(positions, half)
    return angle.cos().to(case.dtype), angle.sin().to(case.dtype)


@pytest.mark.parametrize("case", samples(SHORT), ids=str)
def test_errors_against_those_of_naive_attention(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", samples(LONG, among=4), ids=str)
def test_errors_of_long_caches_against_those_of_naive_attention(case):
    check(case)


def check(case: Case) -> None:
    n_query, n_key = case.lengths
    n_new = (n_query if case.as_many else int(torch.randint(1, n_query + 1, ()))) * case.new
    in_order = case.causal or case.local
    positions = n_query if in_order and case.rotary else n_new
    before = torch.randint(0 if case.new else 1, n_key - positions + 1, (case.batch,)).int()
    begin = (torch.rand(case.batch) * before).int() if case.leftpad else torch.zeros_like(before)
    q, k, v = case.tensors((case.batch, n_query), (case.batch, n_new))
    (k_cache, v_cache), table = cache_of(case)
    cos, sin = angles(case, table)
    options = case.draw()

    k_rows, v_rows = (contents(x, table, n_key) for x in (k_cache, v_cache))
    old = before[:, None].long()
    q_turned, k_turned = q, k
    if cos is not None:
        order = torch.arange(n_query) * in_order
        q_turned = rotated(q, cos, sin, old + order, case.interleaved)
        k_turned = rotated(k, cos, sin, old + torch.arange(n_new), case.interleaved)
    for rows, more in ((k_rows, k_turned), (v_rows, v)):
        rows[torch.arange(case.batch)[:, None], old + torch.arange(n_new)] = more

    o = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        *((k, v) if case.new else ()),
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=before,
        cache_leftpad=begin if case.leftpad else None,
        block_table=table,
        rotary_interleaved=case.interleaved,
        num_splits=case.num_splits,
        **options,
    )
    torch.testing.assert_close(contents(k_cache, table, n_key), k_rows, rtol=1e-3, atol=1e-3)
    assert torch.equal(contents(v_cache, table, n_key), v_rows)

    def exact(q, k_rows, v_rows):
        ranges = [slice(first, last + n_new) for first, last in zip(begin, before, strict=True)]
        keys, values = (
            [x[rows] for x, rows in zip(every, ranges, strict=True)] for every in (k_rows, v_rows)
        )
        return torch.stack(naive_of_each([*q], keys, values, options))

    inputs, factor = (q_turned, k_rows, v_rows), 5 if case.alibi else 3
    assert_within(lambda *_: o, exact, inputs, factor=factor, atol=1e-5, gradients=False)


@pytest.mark.parametrize("case", BEYOND, ids=str)
def test_keys_beyond_the_table_of_pages_are_refused(case):
    q, k, v = case.tensors((1, 1), (1, 1))
    caches = [torch.randn(4, case.page, *k.shape[2:]).to(case.dtype) for _ in range(2)]
    table, capacity = torch.zeros(1, 1, dtype=torch.int32), case.page

    def attend(count: int, *new: Tensor) -> Tensor:
        return flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=count, block_table=table)

    message = rf"cache_seqlens with the new tokens is {capacity + 1}; .* sequence, {capacity}"
    with pytest.raises(ValueError, match=message):
        attend(capacity, k, v) if case.new else attend(capacity + 1)
    assert attend(capacity).isfinite().all()
