"""The cases of flash-attn's tests of packed sequences, also with keys in pages."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from biased_flash_attn.compat import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

from . import flash_attention
from .flash_attention import (
    BOTH,
    FEW,
    FEW_PAIRS,
    FILE,
    OPTIONS,
    Rule,
    assert_repeated,
    naive_of_each,
    page_table,
    products,
    samples,
)
from .oracle import assert_within

PEER = ("flash-attn, packed sequences", FILE)


@dataclass(frozen=True)
class Case(flash_attention.Case):
    """lengths: at most so many queries and keys are in a sequence."""

    page: int | None = None

    @property
    def batch(self) -> int:
        """The number of sequences, of the originals' 2 to 8."""
        return 2 if max(self.lengths) > 1000 else 3

    def each(self) -> tuple[list[int], list[int]]:
        """The numbers of queries and of keys of each sequence."""
        if self.test == "overflow":
            return [76, 34, 146], [1, 1, 1]
        n_query, n_key = (
            torch.randint(max(1, n - 20), n + 1, (self.batch,)).tolist() for n in self.lengths
        )
        return n_query, n_query if self.packed == "qkv" else n_key


PACKED = OPTIONS | {
    "lengths": [(n, n) for n in (97, 128, 200, 257, 384, 512, 768, 1025, 2048)],
    "dim": [32, 59, 64, 80, 96, 128, 160, 192, 224, 256],
    "packed": ["qkv"],
}
SEPARATE = OPTIONS | {
    "lengths": [
        *((1, 147), (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)),
        *((1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)),
    ],
    "dim": [32, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256],
    "packed": ["kv", ""],
    "heads": ["mha", "mqa", "gqa"],
    "softcap": [0.0, 50.0],
}
OVERFLOW = {"lengths": [(256, 3)], "dim": [16, 32, 64], "dtype": [torch.float16], "causal": BOTH}
# The originals of the last two only compare results with themselves, and look for NaN. Their rules
# are those of the dense functions.
RULES = {
    "qkvpacked": Rule(),
    "output": Rule(of_gradients=(3, 0.0)),
    "causal": Rule(atol=1e-5, of_gradients=(2, 1e-5)),
    "deterministic": Rule(atol=1e-5, of_gradients=(3, 2e-4)),
    "overflow": Rule(of_gradients=(5, 1e-3)),
}
CASES = [
    *products(Case, "qkvpacked", **PACKED),
    *products(Case, "output", **SEPARATE),
    *products(Case, "causal", **FEW, causal=[True], page=[None, 256, 512]),
    *products(Case, "deterministic", **FEW, causal=BOTH, deterministic=[True]),
    *products(Case, "overflow", **OVERFLOW),
]
SHORT = [case for case in CASES if case.pairs <= FEW_PAIRS]
LONG = [case for case in CASES if case.pairs > FEW_PAIRS]


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor, n_query, n_key, **options) -> Tensor:
    """The function of the case, for sequences with n_query queries and n_key keys."""
    if case.page is not None:
        return of_pages(case.page, q, k, v, n_query, n_key, **options)
    starts = [torch.tensor([0, *accumulate(x)], dtype=torch.int32) for x in (n_query, n_key)]
    longest = case.lengths if case.test == "overflow" else (max(n_query), max(n_key))
    options |= case.own
    if case.packed == "qkv":
        qkv = torch.stack([q, k, v], 1)
        return flash_attn_varlen_qkvpacked_func(qkv, starts[0], longest[0], **options)
    if case.packed == "kv":
        kv = torch.stack([k, v], 1)
        return flash_attn_varlen_kvpacked_func(q, kv, *starts, *longest, **options)
    return flash_attn_varlen_func(q, k, v, *starts, *longest, **options)


def of_pages(page: int, q: Tensor, k: Tensor, v: Tensor, n_query, n_key, **options) -> Tensor:
    """One call for all sequences, with rows before their queries that make these equally many."""
    most = max(n_query)
    padded = torch.stack([pad(x, (0, 0, 0, 0, most - len(x), 0)) for x in q.split(n_query)])
    columns = -(-max(n_key) // page)
    table = page_table(len(n_key), columns)
    caches = []
    for x in (k, v):
        cache = torch.randn(table.numel(), page, *x.shape[1:]).to(x.dtype)
        for pages, rows in zip(table[:, :columns], x.split(n_key), strict=True):
            full = pad(rows, (0, 0, 0, 0, 0, columns * page - len(rows)))
            cache[pages.long()] = full.unflatten(0, (columns, page))
        caches.append(cache)
    o = flash_attn_with_kvcache(
        padded,
        *caches,
        cache_seqlens=torch.tensor(n_key, dtype=torch.int32),
        block_table=table,
        **options,
    )
    return torch.cat([x[most - n :] for x, n in zip(o, n_query, strict=True)])


def tensors(case: Case, n_query: list[int], n_key: list[int]) -> list[Tensor]:
    large = 3 if case.test == "overflow" else 1
    return [large * x for x in case.tensors((sum(n_query),), (sum(n_key),))]


@pytest.mark.parametrize("case", samples(SHORT), ids=str)
def test_errors_against_those_of_naive_attention(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", samples(LONG, among=4), ids=str)
def test_errors_of_long_sequences_against_those_of_naive_attention(case):
    check(case)


def check(case: Case) -> None:
    n_query, n_key = case.each()
    options = case.draw()

    def exact(q, k, v):
        parts = q.split(n_query), k.split(n_key), v.split(n_key)
        return torch.cat(naive_of_each(*parts, options))

    assert_within(
        lambda *qkv: attend(case, *qkv, n_query, n_key, **options),
        exact,
        tensors(case, n_query, n_key),
        gradients=case.page is None,
        **RULES[case.test]._asdict(),
    )


REPEATED = [case for case in SHORT if case.test == "deterministic"]


@pytest.mark.parametrize("case", samples(REPEATED), ids=str)
def test_results_repeat_exactly(case):
    n_query, n_key = case.each()
    options = case.draw()
    assert_repeated(
        lambda *qkv: attend(case, *qkv, n_query, n_key, **options), tensors(case, n_query, n_key)
    )


@pytest.mark.parametrize("packed", ["qkv", "kv", ""])
def test_dropout_is_refused(packed):
    case = next(x for x in CASES if x.refused == "dropout" and x.packed == packed)
    with pytest.raises(ValueError, match=r"dropout_p is 0\.17; it must be 0"):
        attend(case, *tensors(case, [97], [97]), [97], [97])


@pytest.mark.parametrize("packed", ["kv", ""])
def test_capped_logits_are_refused(packed):
    case = next(x for x in CASES if x.refused == "capped logits" and x.packed == packed)
    with pytest.raises(ValueError, match=r"softcap is 50\.0; it must be 0"):
        attend(case, *tensors(case, [1], [147]), [1], [147])


def test_pages_are_left_to_the_function_of_caches():
    case = next(case for case in CASES if case.test == "causal")
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_table is given; .* flash_attn_with_kvcache reads"):
        attend(case, *tensors(case, [1], [239]), [1], [239], block_table=table)
