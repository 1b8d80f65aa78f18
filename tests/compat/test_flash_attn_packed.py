"""The functions of flash-attn for tensors that contain q, k and v, or k and v."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from biased_flash_attn.compat import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from tests.compat.flash_attn_cases import FlashCase, FlashProblem, check_flash, drawn_flash
from tests.support.cases import pairwise

OPTIONS = {
    "causal": [False, True],
    "window_size": [(-1, -1), (9, 0), (6, 4)],
    "alibi": [None, "heads", "batch"],
    "dtype": [torch.float64, torch.float32, torch.bfloat16],
}
OF_QKV = pairwise(lengths=[(1, 1), (70, 70)], heads=[(1, 1), (3, 3)], **OPTIONS)
OF_KV = pairwise(lengths=[(17, 63), (63, 17), (1, 30)], heads=[(4, 2), (3, 1)], **OPTIONS)


def with_tokens_first(problem: FlashProblem) -> list[Tensor]:
    return [x.transpose(1, 2) for x in (problem.q, problem.k, problem.v)]


def by_qkv(problem: FlashProblem) -> tuple[Tensor, Tensor]:
    qkv = torch.stack(with_tokens_first(problem), 2)
    out, lse, probabilities = flash_attn_qkvpacked_func(
        qkv, **problem.options(), return_attn_probs=True
    )
    assert out.is_contiguous()
    assert probabilities is None
    return out.transpose(1, 2), lse


def by_kv(problem: FlashProblem) -> tuple[Tensor, Tensor]:
    q, *kv = with_tokens_first(problem)
    out, lse, probabilities = flash_attn_kvpacked_func(
        q, torch.stack(kv, 2), **problem.options(), return_attn_probs=True
    )
    assert probabilities is None
    return out.transpose(1, 2), lse


@pytest.mark.parametrize("case", [FlashCase(**row) for row in OF_QKV], ids=str)
def test_qkv_in_one_tensor(case):
    check_flash(drawn_flash(case), by_qkv)


@pytest.mark.parametrize("case", [FlashCase(**row) for row in OF_KV], ids=str)
def test_kv_in_one_tensor(case):
    check_flash(drawn_flash(case), by_kv)


def offsets(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def gradients(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return out, *torch.autograd.grad(out, leaves, torch.ones_like(out).cumsum(0) / len(out))


VISIBILITY = [{}, {"causal": True}, {"window_size": (6, 4)}]


@pytest.mark.parametrize("visibility", VISIBILITY, ids=str)
def test_sequences_of_qkv_and_the_gradient_of_the_tensor(visibility):
    qkv, slopes = torch.randn(60, 3, 4, 16, requires_grad=True), torch.rand(3, 4)
    cu_seqlens = offsets(17, 0, 43)
    options = {"alibi_slopes": slopes} | visibility
    ours = gradients(flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 43, **options), qkv)
    apart = [x.detach().requires_grad_() for x in qkv.unbind(1)]
    both = cu_seqlens, cu_seqlens, 43, 43
    out, *expected = gradients(flash_attn_varlen_func(*apart, *both, **options), *apart)
    assert torch.equal(ours[0], out)
    assert torch.equal(ours[1], torch.stack(expected, 1))


@pytest.mark.parametrize("visibility", VISIBILITY, ids=str)
def test_sequences_of_kv_and_the_gradient_of_the_tensor(visibility):
    q, kv = (torch.randn(*n, 16, requires_grad=True) for n in ((30, 4), (60, 2, 2)))
    both = offsets(9, 0, 21), offsets(17, 5, 38), 21, 38
    options = {"alibi_slopes": torch.rand(4)} | visibility
    ours = gradients(flash_attn_varlen_kvpacked_func(q, kv, *both, **options), q, kv)
    apart = [q, *(x.detach().requires_grad_() for x in kv.unbind(1))]
    out, of_q, *expected = gradients(flash_attn_varlen_func(*apart, *both, **options), *apart)
    assert torch.equal(ours[0], out)
    assert torch.equal(ours[1], of_q)
    assert torch.equal(ours[2], torch.stack(expected, 1))


def test_projections_with_channels_last_but_one_are_copied():
    qkv = torch.randn(2, 9, 3, 8, 4).mT
    out = flash_attn_qkvpacked_func(qkv)
    assert torch.equal(out, flash_attn_qkvpacked_func(qkv.contiguous()))


def test_autocast_unifies_dtypes():
    q, kv = torch.randn(2, 20, 4, 8), torch.randn(2, 20, 2, 2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn_kvpacked_func(q, kv.bfloat16(), causal=True)
    assert torch.equal(out, flash_attn_kvpacked_func(q.bfloat16(), kv.bfloat16(), causal=True))


def test_compiles_as_one_graph():
    arguments = torch.randn(30, 3, 4, 8), offsets(9, 21), 21
    function = flash_attn_varlen_qkvpacked_func
    attend = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(attend(*arguments), function(*arguments))


QKV, KV, Q = torch.randn(2, 6, 3, 4, 8), torch.randn(2, 9, 2, 2, 8), torch.randn(2, 6, 4, 8)
ENDS = torch.tensor([0, 2, 6]).int()
CALLS = {
    flash_attn_qkvpacked_func: {"qkv": QKV},
    flash_attn_kvpacked_func: {"q": Q, "kv": KV},
    flash_attn_varlen_qkvpacked_func: {"qkv": QKV[0], "cu_seqlens": ENDS, "max_seqlen": 4},
    flash_attn_varlen_kvpacked_func: {
        "q": Q[0],
        "kv": KV[0],
        "cu_seqlens_q": ENDS,
        "cu_seqlens_k": torch.tensor([0, 2, 9]).int(),
        "max_seqlen_q": 4,
        "max_seqlen_k": 7,
    },
}
WRONG = [
    (
        flash_attn_qkvpacked_func,
        "qkv has shape .2, 6, 2, 4, 8.; it must be .batch, sequence, 3, heads, head_dim.",
        {"qkv": QKV[:, :, 1:]},
    ),
    (flash_attn_qkvpacked_func, "qkv has shape .6, 3, 4, 8.; it must be", {"qkv": QKV[0]}),
    (flash_attn_qkvpacked_func, "qkv is a list", {"qkv": [QKV]}),
    (flash_attn_qkvpacked_func, "qkv is torch.int64", {"qkv": QKV.long()}),
    (flash_attn_qkvpacked_func, "qkv has head_dim 0", {"qkv": QKV[..., :0]}),
    (flash_attn_qkvpacked_func, "dropout_p is 0.17; it must be 0", {"dropout_p": 0.17}),
    (flash_attn_qkvpacked_func, "softcap is 50; it must be 0", {"softcap": 50}),
    (
        flash_attn_kvpacked_func,
        "kv has shape .2, 9, 1, 2, 8.; it must be .batch, sequence, 2, heads, head_dim.",
        {"kv": KV[:, :, 1:]},
    ),
    (flash_attn_kvpacked_func, "q is a NoneType", {"q": None}),
    (flash_attn_kvpacked_func, "kv is torch.float64 and q is torch.float32", {"kv": KV.double()}),
    (flash_attn_kvpacked_func, "kv has batch 1; it must be that of q, 2", {"kv": KV[:1]}),
    (
        flash_attn_kvpacked_func,
        "kv has head_dim 7; it must be that of q, 8",
        {"kv": KV[..., :7]},
    ),
    (
        flash_attn_kvpacked_func,
        "kv has 3 heads; their number must divide that of q, 4",
        {"kv": torch.randn(2, 9, 2, 3, 8)},
    ),
    (
        flash_attn_varlen_qkvpacked_func,
        "qkv has shape .6, 2, 4, 8.; it must be .total, 3, heads, head_dim.",
        {"qkv": QKV[0, :, 1:]},
    ),
    (flash_attn_varlen_qkvpacked_func, "cu_seqlens is torch.int64", {"cu_seqlens": ENDS.long()}),
    (
        flash_attn_varlen_qkvpacked_func,
        "cu_seqlens ends with 4; it must end with the number of rows of qkv, 6",
        {"cu_seqlens": torch.tensor([0, 4]).int()},
    ),
    (flash_attn_varlen_qkvpacked_func, "max_seqlen is None; it must be", {"max_seqlen": None}),
    (
        flash_attn_varlen_qkvpacked_func,
        "max_seqlen is 3; it must be at least 4",
        {"max_seqlen": 3},
    ),
    (
        flash_attn_varlen_kvpacked_func,
        "kv has shape .9, 1, 2, 8.; it must be .total, 2, heads, head_dim.",
        {"kv": KV[0, :, 1:]},
    ),
    (
        flash_attn_varlen_kvpacked_func,
        "kv has 3 heads; their number must divide that of q, 4$",
        {"kv": torch.randn(9, 2, 3, 8)},
    ),
    (
        flash_attn_varlen_kvpacked_func,
        "cu_seqlens_k ends with 6; it must end with the number of rows of kv, 9",
        {"cu_seqlens_k": ENDS},
    ),
    (
        flash_attn_varlen_kvpacked_func,
        "max_seqlen_k is 6; it must be at least 7",
        {"max_seqlen_k": 6},
    ),
]


@pytest.mark.parametrize(("function", "message", "arguments"), WRONG, ids=[x[1] for x in WRONG])
def test_errors_name_the_packed_argument(function, message, arguments):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        function(**(CALLS[function] | arguments))
