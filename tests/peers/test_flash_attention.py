"""The cases of flash-attn's tests of its dense functions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from biased_flash_attn.compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)

from .flash_attention import (
    BOTH,
    DIMS,
    DTYPES,
    FEW,
    FEW_PAIRS,
    FILE,
    OPTIONS,
    Case,
    Rule,
    assert_repeated,
    naive,
    products,
    samples,
    swapped,
)
from .oracle import assert_within

PEER = ("flash-attn", FILE)
PACKED = OPTIONS | {
    "lengths": [(n, n) for n in (97, 128, 200, 384, 768, 1024, 1025, 2048)],
    "dim": DIMS,
    "packed": ["qkv"],
}
SEPARATE = OPTIONS | {
    "lengths": [
        *((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024)),
        *((1023, 1024), (1024, 1023), (2048, 2048)),
    ],
    "dim": [32, 40, 59, 64, 96, 111, 128, 160, 192, 224, 256],
    "packed": ["kv", ""],
    "heads": ["mha", "mqa", "gqa"],
    "softcap": [0.0, 50.0],
}
SPLIT = OPTIONS | {
    "dropout_p": [0.0],
    "lengths": swapped(
        [
            *((3, 1024), (1, 339), (64, 800), (3, 799), (64, 2048), (16, 20000), (16, 100000)),
            *((128, 128), (256, 256)),
        ]
    ),
    "dim": DIMS,
}
RACES = {
    "lengths": [
        *((1, 239), (239, 1), (3, 799), (799, 3), (1024, 128)),
        *((n, n) for n in (97, 128, 200, 256, 257, 384, 512, 768, 1024)),
    ],
    "dim": DIMS,
    "dtype": [torch.float16],
    "causal": BOTH,
    "dropout_p": [0.0, 0.17],
}
OVERFLOW = {
    "lengths": [(n, n) for n in (1, 2, 5, 17, 128)],
    "dim": [16, 32, 64],
    "dtype": [torch.float16],
    "causal": BOTH,
}
TRANSPOSED = {
    "lengths": [(n, n) for n in (97, 128, 200, 256)],
    "dim": [64, 128],
    "dtype": DTYPES,
    "causal": BOTH,
}
CASES = [
    *products(Case, "qkvpacked", **PACKED),
    *products(Case, "output", **SEPARATE),
    *products(Case, "causal", **FEW, causal=[True]),
    *products(Case, "splitkv", **SPLIT),
    *products(Case, "deterministic", **FEW, causal=BOTH, deterministic=[True]),
    *products(Case, "race_condition", **RACES),
    *products(Case, "bwd_overflow", **OVERFLOW),
    *products(Case, "bwd_transpose", **TRANSPOSED),
]
RULES = {
    "qkvpacked": Rule(),
    "output": Rule(of_gradients=(3, 0.0)),
    "causal": Rule(atol=1e-5, of_gradients=(2, 1e-5)),
    "splitkv": Rule(atol=1e-5, of_gradients=(2, 2e-4)),
    "splitkv with ALiBi": Rule(atol=1e-5, of_gradients=(8, 2e-4)),
    "bwd_overflow": Rule(of_gradients=(5, 1e-3)),
    "bwd_transpose": Rule(),
}
# The originals of these only compare results with themselves. Windows leave few queries.
RULES["deterministic"] = RULES["race_condition"] = Rule(atol=1e-5, of_gradients=(3, 2e-4))
SHORT = [case for case in CASES if case.pairs <= FEW_PAIRS]
LONG = [case for case in CASES if case.pairs > FEW_PAIRS]


def attend(case: Case, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """The function of the case."""
    if case.packed == "qkv":
        return flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **case.own, **options)
    if case.packed == "kv":
        return flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **case.own, **options)
    return flash_attn_func(q, k, v, **case.own, **options)


def tensors(case: Case) -> list[Tensor]:
    q, k, v = case.tensors(*((case.batch, n) for n in case.lengths))
    return [5 * q, 3 * k, 3 * v] if case.test == "bwd_overflow" else [q, k, v]


def spread(o: Tensor) -> Tensor:
    """o (batch, n, ...) as every other column of (n, 2 batch, ...), so that its gradient has the
    strides of these."""
    o = o.transpose(0, 1)
    return torch.stack([o, torch.zeros_like(o)], 2).flatten(1, 2)


@pytest.mark.parametrize("case", samples(SHORT), ids=str)
def test_errors_against_those_of_naive_attention(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", samples(LONG, among=4), ids=str)
def test_errors_of_long_sequences_against_those_of_naive_attention(case):
    check(case)


def check(case: Case) -> None:
    options = case.draw()
    laid_out = spread if case.test == "bwd_transpose" else torch.clone
    rule = "splitkv with ALiBi" if case.test == "splitkv" and case.alibi else case.test
    assert_within(
        lambda *qkv: laid_out(attend(case, *qkv, **options)),
        lambda *qkv: laid_out(naive(*qkv, **options)),
        tensors(case),
        **RULES[rule]._asdict(),
    )


REPEATED = [case for case in SHORT if case.test in ("deterministic", "race_condition")]


@pytest.mark.parametrize("case", samples(REPEATED), ids=str)
def test_results_repeat_exactly(case):
    options = case.draw()
    assert_repeated(lambda *qkv: attend(case, *qkv, **options), tensors(case))


@pytest.mark.parametrize("packed", ["qkv", "kv", ""])
def test_dropout_is_refused(packed):
    case = next(x for x in CASES if x.refused == "dropout" and x.packed == packed)
    with pytest.raises(ValueError, match=r"dropout_p is 0\.17; it must be 0"):
        attend(case, *tensors(case))


@pytest.mark.parametrize("packed", ["kv", ""])
def test_capped_logits_are_refused(packed):
    case = next(x for x in CASES if x.refused == "capped logits" and x.packed == packed)
    with pytest.raises(ValueError, match=r"softcap is 50\.0; it must be 0"):
        attend(case, *tensors(case))
