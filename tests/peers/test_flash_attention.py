"""The cases of flash-attn's tests of packed q, k and v, and its rule: the error of outputs and
gradients against float64 is at most twice that of naive attention in the same dtype."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from biased_flash_attn.compat import flash_attn_qkvpacked_func

from .counting import sampled

PEER = ("flash-attn", "tests/test_flash_attn.py")
# Fewer than the original's 9 heads of 4 batch entries.
BATCH, HEADS = 2, 3
SETTINGS = {
    "seqlen": [97, 128, 200, 384, 768, 1024, 1025, 2048],
    "dim": [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256],
    "dropout_p": [0.0, 0.17],
    "causal": [False, True],
    "local": [False, True],
    "alibi": [False, True],
    "deterministic": [False, True],
    "dtype": [torch.float16, torch.bfloat16],
}


@dataclass(frozen=True)
class QkvCase:
    seqlen: int
    dim: int
    dropout_p: float
    causal: bool
    local: bool
    alibi: bool
    deterministic: bool
    dtype: torch.dtype

    @property
    def refused(self) -> str:
        return "dropout" if self.dropout_p else ""

    def options(self) -> dict:
        left, right = torch.randint(self.seqlen, (2,)).tolist()
        return {
            "dropout_p": self.dropout_p,
            "causal": self.causal,
            "window_size": (left, right) if self.local else (-1, -1),
            "alibi_slopes": 0.3 * torch.rand(BATCH, HEADS) if self.alibi else None,
        }


CASES = [
    QkvCase(**dict(zip(SETTINGS, row, strict=True)))
    for row in itertools.product(*SETTINGS.values())
]
# Naive attention in half precision is slow for long sequences.
SHORT = [case for case in CASES if case.seqlen <= 200]
LONG = [case for case in CASES if case.seqlen > 200]


def naive(qkv: Tensor, causal: bool, window_size, alibi_slopes, dropout_p: float = 0.0) -> Tensor:
    """Attention in the dtype of qkv."""
    q, k, v = qkv.unbind(2)
    d = torch.arange(qkv.shape[1])[:, None] - torch.arange(qkv.shape[1])
    s = torch.einsum("bihd,bjhd->bhij", q * qkv.shape[-1] ** -0.5, k)
    if alibi_slopes is not None:
        s = s - (alibi_slopes[..., None, None] * d.abs()).to(s.dtype)
    left, right = window_size
    hidden = torch.zeros_like(d, dtype=torch.bool)
    if causal:
        hidden |= d < 0
    if left != -1:
        hidden |= (d > left) | (d < -right)
    p = s.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", p, v)


@pytest.mark.parametrize("case", sampled(SHORT, "short", alone="dim"), ids=str)
def test_errors_are_at_most_twice_those_of_naive_attention(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(LONG, "long", alone="dim"), ids=str)
def test_errors_of_long_sequences_are_at_most_twice_those_of_naive_attention(case):
    check(case)


def check(case: QkvCase) -> None:
    qkv = torch.randn(BATCH, case.seqlen, 3, HEADS, case.dim).to(case.dtype)
    grad = torch.randn(BATCH, case.seqlen, HEADS, case.dim).to(case.dtype)
    options = case.options()

    def results(attend, dtype: torch.dtype, **more) -> tuple[Tensor, Tensor]:
        x = qkv.to(dtype).requires_grad_()
        out = attend(x, **options, **more)
        return out.detach(), torch.autograd.grad(out, x, grad.to(dtype))[0]

    exact = results(naive, torch.float64)
    same_dtype = results(naive, case.dtype)
    ours = results(flash_attn_qkvpacked_func, case.dtype, deterministic=case.deterministic)
    for x, plain, truth in zip(ours, same_dtype, exact, strict=True):
        assert (x - truth).abs().max() <= 2 * (plain - truth).abs().max()


def test_dropout_is_refused():
    case = next(case for case in CASES if case.refused == "dropout")
    qkv = torch.randn(BATCH, case.seqlen, 3, HEADS, case.dim)
    with pytest.raises(ValueError, match=r"dropout_p is 0\.17; it must be 0"):
        flash_attn_qkvpacked_func(qkv, **case.options())
