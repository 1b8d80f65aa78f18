"""A bias with a number of its own for each pair, in the Triton kernels."""

from __future__ import annotations

import functools

import pytest
import torch

from biased_flash_attn import biased_flash_attn, biases
from tests.decoding.cases import check_decoding, decoded, make_cache
from tests.kernels.triton.backend import MARKS, attend
from tests.sequences.packed_cases import PackedCase, drawn_packed, packed
from tests.support.biases import DENSE
from tests.support.cases import Case, pairwise
from tests.support.problems import check, check_problem, drawn

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = MARKS

COMBINATIONS = pairwise(
    bias=[*DENSE],
    dtype=DTYPES,
    lengths=[(17, 63), (63, 17), (130, 130)],
    dims=[(16, 16), (64, 64), (19, 80)],
    heads=[(4, 2)],
    causal=[True, False],
    window=[None, 5, 500],
    trained=[True, False],
)


@pytest.mark.parametrize("case", [Case(**row) for row in COMBINATIONS], ids=str)
def test_every_pair_of_settings_is_exact(case):
    check(case, attend)


@pytest.mark.parametrize("bias", ["dense-heads", "dense-shared"])
def test_packed_sequences_read_their_own_pairs(bias):
    case = PackedCase.of(((40, 70), (0, 3), (80, 20)), bias=bias, heads=(4, 2), window=50)
    check_problem(drawn_packed(case), functools.partial(packed, backend="triton"))


def test_infinities_hide_pairs_and_whole_rows():
    q, k, v = (torch.randn(1, 2, 70, 16) for _ in range(3))
    mask = torch.zeros(70, 70).masked_fill_(torch.rand(70, 70) < 0.5, -torch.inf)
    mask[17] = -torch.inf
    ours, exact = (
        biased_flash_attn(q, k, v, biases.DenseBias(mask), return_lse=True, backend=backend)
        for backend in ("triton", "reference")
    )
    for x, y in zip(ours, exact, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_tensor_may_have_16_bits_and_any_strides(dtype):
    q, tensor = torch.randn(1, 2, 70, 16).to(dtype), torch.randn(2, 70, 70).to(dtype)
    for bias in (tensor, tensor.mT, tensor[:, :1], tensor.repeat(1, 1, 2)[..., 5:75]):
        ours, exact = (
            biased_flash_attn(q, q, q, biases.DenseBias(bias), backend=backend).float()
            for backend in ("triton", "reference")
        )
        torch.testing.assert_close(ours, exact, rtol=2e-2, atol=2e-2)


def test_steps_of_decoding_take_their_rows():
    problem = drawn(Case("dense", torch.float16, lengths=(100, 100), heads=(4, 2)))
    check_decoding(problem, *decoded(problem, make_cache(problem, "paged"), (70, 1, 29), "triton"))
