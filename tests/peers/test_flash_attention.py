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
    FEW_PAIRS,
    FILE,
    OPTIONS,
    Case,
    Rule,
    naive,
    products,
    samples,
)
from .oracle import assert_within

PEER = ("flash-attn", FILE)
BATCH = 2  # of the original's 4
PACKED = OPTIONS | {
    "lengths": [(n, n) for n in (97, 128, 200, 384, 768, 1024, 1025, 2048)],
    "dim": [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256],
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
RULES = {"qkvpacked": Rule(), "output": Rule(of_gradients=(3, 0.0))}

CASES = products(Case, "qkvpacked", **PACKED) + products(Case, "output", **SEPARATE)
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
    return case.tensors(*((BATCH, n) for n in case.lengths))


@pytest.mark.parametrize("case", samples(SHORT), ids=str)
def test_errors_against_those_of_naive_attention(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", samples(LONG), ids=str)
def test_errors_of_long_sequences_against_those_of_naive_attention(case):
    check(case)


def check(case: Case) -> None:
    options = case.draw(BATCH)
    assert_within(
        lambda *qkv: attend(case, *qkv, **options),
        lambda *qkv: naive(*qkv, **options),
        tensors(case),
        **RULES[case.test]._asdict(),
    )


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
