"""Invalid packed sequences raise one error that names the argument, before any work."""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn import biased_flash_attn_varlen, biases
from biased_flash_attn.forms import Linear
from tests.support.lowered import LoweredTo


def offsets(*values: int, dtype=torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


PACKED = {
    "q": torch.randn(6, 4, 8),
    "k": torch.randn(9, 2, 8),
    "v": torch.randn(9, 2, 5),
    "cu_seqlens_q": offsets(0, 2, 6),
    "cu_seqlens_k": offsets(0, 5, 9),
}
WRONG_PACKED = {
    "q is not a tensor": (TypeError, "q is a NoneType", {"q": None}),
    "q has four dimensions": (
        ValueError,
        r"q has shape \(1, 6, 4, 8\); it must be \(total, heads, head_dim\)",
        {"q": torch.randn(1, 6, 4, 8)},
    ),
    "v has another total": (
        ValueError,
        r"v has shape \(8, 2, 5\); its total and heads must be those of k, \(9, 2\)",
        {"v": torch.randn(8, 2, 5)},
    ),
    "k has another dtype": (TypeError, "k is torch.float64", {"k": PACKED["k"].double()}),
    "heads do not divide": (
        ValueError,
        "k has 3 heads; their number must divide that of q, 4",
        {"k": torch.randn(9, 3, 8), "v": torch.randn(9, 3, 5)},
    ),
    "channels have a stride": (
        ValueError,
        "q has stride 4 in its last dimension",
        {"q": torch.randn(6, 8, 4).mT},
    ),
    "offsets are a list": (TypeError, "cu_seqlens_q is a list", {"cu_seqlens_q": [0, 2, 6]}),
    "offsets are int64": (
        TypeError,
        "cu_seqlens_k is torch.int64; it must be torch.int32",
        {"cu_seqlens_k": offsets(0, 5, 9, dtype=torch.int64)},
    ),
    "offsets have two dimensions": (
        ValueError,
        r"cu_seqlens_q has shape \(1, 3\); it must be \(sequences \+ 1,\)",
        {"cu_seqlens_q": offsets(0, 2, 6)[None]},
    ),
    "there are no offsets": (
        ValueError,
        r"cu_seqlens_q has shape \(0,\)",
        {"cu_seqlens_q": offsets(), "cu_seqlens_k": offsets()},
    ),
    "there are fewer sequences of keys": (
        ValueError,
        r"cu_seqlens_k has shape \(2,\); it must be that of cu_seqlens_q, \(3,\)",
        {"cu_seqlens_k": offsets(0, 9)},
    ),
    "offsets are on another device": (
        ValueError,
        "cu_seqlens_k is on meta and q on cpu",
        {"cu_seqlens_k": offsets(0, 5, 9).to("meta")},
    ),
    "offsets begin later": (
        ValueError,
        "cu_seqlens_q begins with 1; it must begin with 0$",
        {"cu_seqlens_q": offsets(1, 2, 6)},
    ),
    "offsets are lengths": (
        ValueError,
        r"cu_seqlens_q begins with 2; .* cumulative sums of lengths, \[0, 2, 6\]$",
        {"cu_seqlens_q": offsets(2, 4), "cu_seqlens_k": offsets(5, 4)},
    ),
    "offsets are many lengths": (
        ValueError,
        r"cu_seqlens_q begins with 1; .*, \[0, 1, 2, 3, 4, 5, 6, 6, 6, \.\.\.\]$",
        {"cu_seqlens_q": offsets(*6 * [1], 0, 0, 0), "cu_seqlens_k": offsets(*9 * [1])},
    ),
    "offsets begin below 0": (
        ValueError,
        "cu_seqlens_k begins with -1",
        {"cu_seqlens_k": offsets(-1, 5, 9)},
    ),
    "offsets decrease": (
        ValueError,
        "cu_seqlens_q falls from 7 to 6 at 2; it must not decrease",
        {"cu_seqlens_q": offsets(0, 7, 6)},
    ),
    "offsets are negative": (
        ValueError,
        "cu_seqlens_k falls from 0 to -3 at 1",
        {"cu_seqlens_k": offsets(0, -3, 9)},
    ),
    "offsets end too early": (
        ValueError,
        "cu_seqlens_q ends with 5; it must end with the number of rows of q, 6",
        {"cu_seqlens_q": offsets(0, 2, 5)},
    ),
    "offsets end too late": (
        ValueError,
        "cu_seqlens_k ends with 10; it must end with the number of rows of k, 9",
        {"cu_seqlens_k": offsets(0, 5, 10)},
    ),
    "the maximum is too small": (
        ValueError,
        "max_seqlen_q is 3; it must be at least 4",
        {"max_seqlen_q": 3},
    ),
    "the maximum is not an int": (TypeError, "max_seqlen_k is 5.0", {"max_seqlen_k": 5.0}),
    "the maximum is negative": (ValueError, "max_seqlen_k is -1", {"max_seqlen_k": -1}),
    "steps have the length of one sequence": (
        ValueError,
        "steps has length 5; it must be the number of keys, 9",
        {"bias": biases.CumulativeBias(torch.zeros(1, 4, 5))},
    ),
    "steps have a batch": (
        ValueError,
        "bias has batch 2; it must be that of q, 1, or 1",
        {"bias": biases.CumulativeBias(torch.zeros(2, 4, 9))},
    ),
    "slopes have three sequences": (
        ValueError,
        "bias has batch 3; it must be that of q, 2, or 1",
        {"bias": LoweredTo(Linear(torch.ones(3, 4)))},
    ),
    "gains per key with more queries than keys": (
        ValueError,
        "gain has one number per key and a sequence has more queries than keys",
        {
            "bias": biases.CumulativeBias(torch.zeros(1, 4, 9), torch.zeros(1, 4, 9)),
            "cu_seqlens_k": offsets(0, 1, 9),
        },
    ),
    "causal is a number": (TypeError, "causal is 1", {"causal": 1}),
    "backend is unknown": (ValueError, "backend is 'cudnn'; it may be", {"backend": "cudnn"}),
}


@pytest.mark.parametrize(
    ("error", "message", "change"), WRONG_PACKED.values(), ids=WRONG_PACKED.keys()
)
def test_invalid_packed_arguments_are_refused_before_any_work(monkeypatch, error, message, change):
    def work(*args):
        raise AssertionError("work was begun")

    monkeypatch.setattr("biased_flash_attn.operators.forward", work)
    with pytest.raises(error, match="^" + message):
        biased_flash_attn_varlen(**PACKED | change)


@pytest.mark.parametrize("row", [0, 5, 8])
def test_packed_steps_with_nan_are_refused(row):
    steps = torch.zeros(1, 4, 9)
    steps[0, 2, row] = torch.nan
    with pytest.raises(ValueError, match=r"^bias: its steps contain NaN"):
        biased_flash_attn_varlen(**PACKED, bias=biases.CumulativeBias(steps))
