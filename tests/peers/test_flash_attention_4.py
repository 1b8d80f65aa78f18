"""FlashAttention 4, tests/cute/test_score_mod.py and test_score_mod_varlen.py: biases of pairs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from biased_flash_attn import biased_flash_attn, biased_flash_attn_varlen, biases
from biased_flash_attn.compat import flash_attn_with_kvcache, scaled_dot_product_attention

from .counting import sampled
from .oracle import assert_within, attention
from .score_mods import MODS, Pairs, slopes

PEER = ("FlashAttention 4", "tests/cute/test_score_mod{,_varlen}.py")
PAGES = "tables of pages with biases other than ALiBi that ends at the last key"


@dataclass(frozen=True)
class Case:
    test: str
    mod: str
    lengths: tuple[tuple[int, int], ...]  # the queries and keys of each sequence
    packed: str = ""  # whether the queries "q", the keys "k" or both, "qk"
    heads: tuple[int, int] = (8, 2)
    dim: int = 128
    dtype: torch.dtype = torch.float16
    backward: bool = False
    page: int = 0

    def __str__(self) -> str:
        lengths = "_".join(f"{n}x{m}" for n, m in self.lengths)
        dtype = str(self.dtype).removeprefix("torch.")
        parts = (self.test, self.mod, lengths, self.packed or "batch", self.heads, self.dim, dtype)
        return "-".join([*map(str, parts), f"page{self.page}"])

    @property
    def refused(self) -> str:
        (n_query, n_key), *_ = self.lengths
        at_end = self.mod in ("causal", "causal_v2") or (self.mod == "alibi" and n_query == n_key)
        unpaged = not self.page or at_end or self.mod in ("identity", "times_two")
        return MODS[self.mod].refused or ("" if unpaged else PAGES)

    @property
    def pairs(self) -> int:
        return self.heads[0] * sum(n * m for n, m in self.lengths)

    @property
    def numbers(self) -> int:
        return self.heads[0] * self.dim * sum(max(pair) for pair in self.lengths)


DTYPES = (torch.float16, torch.bfloat16)
PLAIN = (
    "identity",
    "causal",
    "rel_bias",
    "rel_bias_x2",
    "times_two",
    "alibi",
    "sliding_window",
    "block_diagonal",
    "causal_v2",
)
BUFFERED = ("batch_bias", "dual_buffer")
# The sides that have to be packed.
GLOBAL = {
    "global_kv_bias": "k",
    "global_q_bias": "q",
    "global_rel_plus_kv_bias": "k",
    "global_q_and_kv_bias": "qk",
    "global_logical_rel_plus_kv_bias": "k",
    "stress_complex_arithmetic": "q",
    "stress_conditional_mask": "qk",
    "stress_multi_buffer": "qk",
    "stress_global_offset": "k",
    "stress_xor_pattern": "k",
    "debug_global_idx": "k",
}
LENGTHS = [
    *((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128)),
    *((128, 217), (113, 211), (108, 256), (256, 512), (384, 256), (640, 128), (512, 256)),
    *((1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096), (4224, 4224)),
]
BACKWARD_LENGTHS = [
    *((64, 64), (128, 128), (256, 256), (512, 512), (799, 3), (3, 799), (128, 256), (256, 128)),
    (113, 203),
]
SAME = [
    *((1,), (1, 1), (2, 3), (8, 16), (32, 32), (64, 128), (64, 56, 128), (256, 512), (113, 203)),
    *((239, 1), (64,), (128, 128), (32,) * 4, (16, 32, 64, 128, 256), (1, 1024), (1024, 1)),
    *((1, 256, 1), (256, 1, 256), (17, 33, 65)),
]
K = 1024
SEQUENCES = [
    *((n, n) for n in SAME),
    *(((64, 128), (32, 64)), ((100, 100), (50, 50)), ((256, 512, 256), (128, 256, 128))),
    *(((2, 1), (16 * K, 32 * K)), ((1, 1), (128 * K,) * 2), ((2, 1), (8 * K,) * 2)),
    *(((1, 3), (8 * K,) * 2), ((3, 3), (8 * K,) * 2), ((128, 128), (8 * K,) * 2)),
    *(((2,) * 3, (8 * K,) * 3), ((2, 1), (32 * K, 16 * K)), ((1, 2), (32 * K, 16 * K))),
    *(((1,) * 3, (128 * K,) * 3), ((1,) * 3, (256 * K,) * 3)),
]


def batches() -> Iterator[Case]:
    """The cases of test_score_mod.py, with two sequences of the same lengths."""
    forward = itertools.product(LENGTHS, DTYPES)
    for n, dtype in forward:
        for mod, heads in itertools.product(PLAIN, ((2, 2), (8, 2))):
            yield Case("forward", mod, (n,) * 2, heads=heads, dtype=dtype)
        for mod, heads in itertools.product(BUFFERED, ((1, 1), (8, 2))):
            yield Case("forward", mod, (n,) * 2, heads=heads, dtype=dtype)
    for n, dim, dtype in itertools.product(BACKWARD_LENGTHS, (64, 128), DTYPES):
        for mod in ("times_two", "rel_bias", "squared", "causal"):
            yield Case("backward", mod, (n,) * 2, "", (4, 4), dim, dtype, True)
    for n, dim, dtype in itertools.product(((64, 64), (128, 128), (256, 128)), (64, 128), DTYPES):
        for mod in BUFFERED:
            yield Case("backward_with_aux", mod, (n,) * 2, "", (4, 4), dim, dtype, True)
    for n, dim, dtype in itertools.product(((128, 128), (128, 256)), (64, 128), DTYPES):
        for mod in ("times_two", "rel_bias"):
            yield Case("backward_gqa", mod, (n,) * 2, "", (8, 2), dim, dtype, True)


def paged_batches() -> Iterator[Case]:
    """The same with pages of keys, or none, where pages divide the keys."""
    lengths = ((1, 128), (64, 256), (64, 800), (256, 256), (113, 203))
    plain = itertools.product(PLAIN, lengths, ((2, 2), (8, 2)), (0, 1, 4, 128))
    lengths = ((64, 128), (128, 256), (256, 256))
    buffered = itertools.product(BUFFERED, lengths, ((1, 1), (8, 2)), (0, 128))
    for (mod, n, heads, page), dtype in itertools.product((*plain, *buffered), DTYPES):
        if not page or n[1] % page == 0:
            yield Case("paged", mod, (n,) * 2, "", heads, 128, dtype, False, page)


def packed_sequences() -> Iterator[Case]:
    """The cases of test_score_mod_varlen.py. Lengths of a side that is not packed are its first."""
    mods = {**dict.fromkeys((*PLAIN, *BUFFERED), ""), **GLOBAL}
    for (n, m), dtype, side in itertools.product(SEQUENCES, DTYPES, ("q", "k", "qk")):
        queries = n if "q" in side else n[:1] * len(n)
        keys = m if "k" in side else m[:1] * len(m)
        for mod, needed in mods.items():
            if set(needed) <= set(side):
                for heads in ((1, 1), (8, 2)) if needed else ((8, 2),):
                    test = "packed_global" if needed else "packed"
                    lengths = tuple(zip(queries, keys, strict=True))
                    yield Case(test, mod, lengths, side, heads, 128, dtype)
    mods = ("times_two", "rel_bias_clamped", "squared", "causal", "dual_buffer", "scaled_squared")
    for (n, m), dtype, dim, mod in itertools.product(SEQUENCES, DTYPES, (64, 128), mods):
        lengths = tuple(zip(n, m, strict=True))
        yield Case("packed_backward", mod, lengths, "qk", (4, 4), dim, dtype, True)


CASES = [*batches(), *paged_batches(), *packed_sequences()]


def buffers_of(case: Case) -> list[Tensor]:
    lengths = {
        "batch": len(case.lengths),
        "head": case.heads[0],
        "position": max(n for n, _ in case.lengths),
        "query": sum(n for n, _ in case.lengths),
        "key": sum(m for _, m in case.lengths),
    }
    of_kind = {"position": lambda n: 0.01 * torch.arange(n), "head": lambda n: 0.2 * torch.randn(n)}
    makers = [
        (of_kind.get(kind, lambda n: 0.1 * torch.randn(n)), kind) for kind in MODS[case.mod].buffers
    ]
    return [make(lengths[kind]).to(case.dtype) for make, kind in makers]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def naive(case: Case, q: Tensor, k: Tensor, v: Tensor, *buffers: Tensor) -> Tensor:
    """Attention in each sequence alone; q (total, H, D), k and v (total, Hkv, D)."""
    mod, scale, outputs = MODS[case.mod], MODS[case.mod].factor / case.dim**0.5, []
    h = torch.arange(case.heads[0])[:, None, None]
    sizes = [[*column] for column in zip(*case.lengths, strict=True)]
    parts = zip(q.split(sizes[0]), k.split(sizes[1]), v.split(sizes[1]), strict=True)
    first_query = first_key = 0
    for b, (q_b, k_b, v_b) in enumerate(parts):
        i, j = torch.arange(len(q_b))[:, None], torch.arange(len(k_b))
        pairs = Pairs(torch.tensor(b), h, i, j, i + first_query, j + first_key)
        q_b, k_b, v_b = (x.transpose(0, 1) for x in (q_b, k_b, v_b))
        outputs.append(attention(q_b, k_b, v_b, mod.bias(pairs, *buffers), scale).transpose(0, 1))
        first_query, first_key = first_query + len(i), first_key + len(j)
    return torch.cat(outputs)


def bias_of(case: Case, indices: Pairs, *buffers: Tensor):
    """A function of the distance from the last key, where it is the same in all sequences."""
    mod, heads = MODS[case.mod], case.heads[0]
    later = {m - n for n, m in case.lengths}
    if mod.distance is None or len(later) > 1:
        return biases.DenseBias(torch.atleast_2d(mod.bias(indices, *buffers)))
    if case.mod == "alibi" and later == {0}:
        return biases.ALiBi(slopes=slopes(torch.arange(heads)))
    after = later.pop()
    return biases.DistanceBias.from_function(
        lambda d: mod.distance(d - after, heads), heads, signed=True
    )


def of_packed(case: Case, q: Tensor, k: Tensor, v: Tensor, *buffers: Tensor) -> Tensor:
    mod, (n_queries, n_keys) = MODS[case.mod], zip(*case.lengths, strict=True)
    cu_queries, cu_keys = starts(n_queries), starts(n_keys)
    i, j = (torch.cat([*map(torch.arange, sizes)]) for sizes in (n_queries, n_keys))
    b = torch.arange(len(n_queries)).repeat_interleave(torch.tensor(n_queries))[:, None]
    h = torch.arange(case.heads[0])[:, None, None]
    query, key = torch.arange(len(i))[:, None], torch.arange(len(j))
    causal = mod.causal and n_queries == n_keys
    bias = None if causal else bias_of(case, Pairs(b, h, i[:, None], j, query, key), *buffers)
    scale = mod.factor / case.dim**0.5
    return biased_flash_attn_varlen(q, k, v, cu_queries, cu_keys, bias, causal=causal, scale=scale)


def of_batch(case: Case, q: Tensor, k: Tensor, v: Tensor, *buffers: Tensor) -> Tensor:
    mod, batch, (n, m) = MODS[case.mod], len(case.lengths), case.lengths[0]
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
    scale = mod.factor / case.dim**0.5
    if mod.causal:
        o = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        b = torch.arange(batch)[:, None, None, None]
        h, i, j = (
            torch.arange(case.heads[0])[:, None, None],
            torch.arange(n)[:, None],
            torch.arange(m),
        )
        bias = bias_of(case, Pairs(b, h, i, j, b * n + i, b * m + j), *buffers)
        o = biased_flash_attn(q, k, v, bias, causal=False, scale=scale)
    return o.transpose(1, 2).flatten(0, 1)


def of_pages(case: Case, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Pages in a random order. Causal queries begin at the first key, and see none after them."""
    mod, batch, (n, m) = MODS[case.mod], len(case.lengths), case.lengths[0]
    table = torch.randperm(batch * m // case.page).int().view(batch, -1)
    pages = [x.unflatten(0, (-1, case.page))[table.flatten().argsort()] for x in (k, v)]
    o = flash_attn_with_kvcache(
        q.unflatten(0, (batch, -1)),
        *pages,
        cache_seqlens=n if mod.causal else m,
        block_table=table,
        softmax_scale=mod.factor / case.dim**0.5,
        causal=mod.causal,
        alibi_slopes=slopes(torch.arange(case.heads[0])) if case.mod == "alibi" else None,
    )
    return o.flatten(0, 1)


def compare(case: Case) -> None:
    sizes = [sum(column) for column in zip(*case.lengths, strict=True)]
    shapes = [(sizes[0], case.heads[0]), *[(sizes[1], case.heads[1])] * 2]
    inputs = [torch.randn(*shape, case.dim).to(case.dtype) for shape in shapes]
    buffers = buffers_of(case)
    function = of_pages if case.page else of_packed if case.packed else of_batch
    ours, exact = (partial(f, case) for f in (function, naive))
    loose = case.packed or case.test in ("backward_with_aux", "backward_gqa")
    assert_within(
        lambda *x: ours(*x, *(y.to(x[0].dtype) for y in buffers)),
        lambda *x: exact(*x, *(y.to(x[0].dtype) for y in buffers)),
        inputs,
        factor=3 if case.backward and loose else 2,
        atol=(1e-3 if case.backward else 1e-4) if case.packed else 1e-7,
        gradients=case.backward,
    )
    if buffers:  # many of whose gradients cancel, so that only rounding errors are left
        assert_within(ours, exact, [x.double() for x in (*inputs, *buffers)], factor=0, atol=1e-9)


FAST = [case for case in CASES if case.pairs <= 10**6 and case.numbers <= 10**6]
LONG = [case for case in CASES if case.pairs <= 4 * 10**7 and case.numbers <= 2**26]


@pytest.mark.parametrize("case", sampled(FAST, "fast", alone="lengths"), ids=str)
def test_biases(case):
    compare(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(LONG, "long", alone="lengths"), ids=str)
def test_biases_of_long_sequences(case):
    compare(case)


Q = torch.randn(1, 4, 8, 16)
CALLS = [
    partial(biased_flash_attn, Q, Q, Q),
    partial(biased_flash_attn_varlen, Q[0], Q[0], Q[0], *[torch.tensor([0, 4])] * 2),
]


def squared(score, b, h, i, j):
    return score * score


@pytest.mark.parametrize("call", CALLS)
def test_functions_of_logits_are_refused(call):
    with pytest.raises(TypeError, match=r"'score_mod': pass what it adds to the logits as bias"):
        call(score_mod=squared)


def test_functions_of_logits_are_no_biases():
    with pytest.raises(TypeError, match=r"bias is a function; .* DistanceBias\.from_function"):
        biased_flash_attn(Q, Q, Q, squared)


@pytest.mark.parametrize("call", CALLS)
def test_tables_of_pages_are_refused(call):
    with pytest.raises(TypeError, match=r"'block_table': pages belong to a KVCache.*compat\."):
        call(block_table=torch.zeros(1, 1, dtype=torch.int32))
