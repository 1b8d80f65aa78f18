"""The cases of flash-attn's tests of its dense functions, and its rule: errors against float64 are
at most twice those of naive attention in the same dtype, or three times for gradients of q, k and v
that are not packed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from biased_flash_attn.compat import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
)

from .counting import sampled

PEER = ("flash-attn", "tests/test_flash_attn.py")
# Fewer than the original's 4 batch entries and 9 heads.
BATCH, HEADS = 2, 3
KV_HEADS = {"mha": 3, "gqa": 3, "mqa": 1}
OPTIONS = {
    "dropout_p": [0.0, 0.17],
    "causal": [False, True],
    "local": [False, True],
    "alibi": [False, True],
    "deterministic": [False, True],
    "dtype": [torch.float16, torch.bfloat16],
}
PACKED = OPTIONS | {
    "lengths": [(n, n) for n in (97, 128, 200, 384, 768, 1024, 1025, 2048)],
    "dim": [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256],
    "packed": ["qkv"],
    "heads": ["mha"],
    "softcap": [0.0],
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


@dataclass(frozen=True)
class Case:
    dropout_p: float
    causal: bool
    local: bool
    alibi: bool
    deterministic: bool
    dtype: torch.dtype
    lengths: tuple[int, int]
    dim: int
    packed: str
    heads: str
    softcap: float

    @property
    def refused(self) -> str:
        return "dropout" if self.dropout_p else "capped logits" if self.softcap else ""

    def tensors(self) -> list[Tensor]:
        """q, k and v, with the heads of two query heads for each key head in `gqa`."""
        (n_query, n_key), heads = self.lengths, 2 * HEADS if self.heads == "gqa" else HEADS
        of_keys = (BATCH, n_key, KV_HEADS[self.heads], self.dim)
        shapes = (BATCH, n_query, heads, self.dim), of_keys, of_keys
        return [torch.randn(shape).to(self.dtype) for shape in shapes]

    def options(self, heads: int) -> dict:
        left, right = torch.randint(self.lengths[1], (2,)).tolist()
        return {
            "causal": self.causal,
            "window_size": (left, right) if self.local else (-1, -1),
            "alibi_slopes": 0.3 * torch.rand(BATCH, heads) if self.alibi else None,
        }

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        """The function of the case."""
        own = {"dropout_p": self.dropout_p, "deterministic": self.deterministic}
        own |= {"softcap": self.softcap, **options}
        if self.packed == "qkv":
            return flash_attn_qkvpacked_func(torch.stack([q, k, v], 2), **own)
        if self.packed == "kv":
            return flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **own)
        return flash_attn_func(q, k, v, **own)


def cases(settings: dict[str, list]) -> list[Case]:
    """The product of the settings, except for those that the peer skips."""
    every = (Case(**dict(zip(settings, row, strict=True))) for row in product(*settings.values()))
    return [case for case in every if not (case.dropout_p and case.softcap)]


CASES = cases(PACKED) + cases(SEPARATE)
# Naive attention in half precision is slow for long sequences.
SHORT = [case for case in CASES if max(case.lengths) <= 256]
LONG = [case for case in CASES if max(case.lengths) > 256]


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size, alibi_slopes) -> Tensor:
    """Attention in the dtype of q; the last query is aligned with the last key."""
    group, n_query, n_key = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    d = torch.arange(n_query)[:, None] + n_key - n_query - torch.arange(n_key)
    s = torch.einsum("bihd,bjhd->bhij", q * q.shape[-1] ** -0.5, k)
    if alibi_slopes is not None:
        s = s - (alibi_slopes[..., None, None] * d.abs()).to(s.dtype)
    left, right = window_size
    hidden = torch.zeros_like(d, dtype=torch.bool)
    if causal:
        hidden |= d < 0
    if left != -1:
        hidden |= (d > left) | (d < -right)
    p = s.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden.all(1)[:, None], 0)
    return torch.einsum("bhij,bjhd->bihd", p, v)


@pytest.mark.parametrize("case", sampled(SHORT, "short", alone="dim"), ids=str)
def test_errors_against_those_of_naive_attention(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(LONG, "long", alone="dim"), ids=str)
def test_errors_of_long_sequences_against_those_of_naive_attention(case):
    check(case)


def check(case: Case) -> None:
    given = case.tensors()
    grad, options = torch.randn_like(given[0]), case.options(given[0].shape[2])

    def results(attend, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in given]
        out = attend(*leaves, **options)
        return out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))

    exact, same_dtype = (results(naive, dtype) for dtype in (torch.float64, case.dtype))
    ours = results(case.attend, case.dtype)
    factors = (2, 2, 2, 2) if case.packed == "qkv" else (2, 3, 3, 3)
    for x, plain, truth, factor in zip(ours, same_dtype, exact, factors, strict=True):
        assert (x - truth).abs().max() <= factor * (plain - truth).abs().max()


@pytest.mark.parametrize("packed", ["qkv", "kv", ""])
def test_dropout_is_refused(packed):
    case = next(x for x in CASES if x.refused == "dropout" and x.packed == packed)
    with pytest.raises(ValueError, match=r"dropout_p is 0\.17; it must be 0"):
        case.attend(*case.tensors())


@pytest.mark.parametrize("packed", ["kv", ""])
def test_capped_logits_are_refused(packed):
    case = next(x for x in CASES if x.refused == "capped logits" and x.packed == packed)
    with pytest.raises(ValueError, match=r"softcap is 50\.0; it must be 0"):
        case.attend(*case.tensors())
