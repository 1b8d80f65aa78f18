"""Attention as flash-attn documents it, and problems that are compared with it.

It shares nothing with the package except the bound on errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from biased_flash_attn.compat import flash_attn_func
from tests.support.cases import LAYOUTS, Case
from tests.support.numerics import assert_close_to_float64
from tests.support.problems import Problem, evaluate, magnitudes


@dataclass(frozen=True)
class Mask:
    """The visible keys of each query: 1 and 0 in the documentation."""

    n_query: int
    n_key: int
    causal: bool
    window_size: tuple[int, int]

    def visible(self, device=None) -> Tensor:
        left, right = self.window_size
        i, j = torch.arange(self.n_query)[:, None], torch.arange(self.n_key)
        at = i + self.n_key - self.n_query
        seen = torch.ones(self.n_query, self.n_key, dtype=torch.bool)
        if self.causal:
            seen &= j <= at
        if left != -1:
            seen &= j >= at - left
        if right != -1:
            seen &= j <= at + right
        return seen


def documented(q, k, v, mask: Mask, scale: float, slopes: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen, nheads, headdim) in q's dtype, and the logsumexp of each row, in at least
    float32."""
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    s = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    if slopes is not None:
        i, j = torch.arange(mask.n_query)[:, None], torch.arange(mask.n_key)
        distance = (i + mask.n_key - mask.n_query - j).abs()
        s = s + (-slopes.view(-1, heads, 1, 1) * distance).to(s.dtype)
    seen = mask.visible()
    sees = seen.any(-1, keepdim=True)
    s = torch.where(seen, s, -torch.inf).where(sees, 0)
    out = torch.einsum("bhij,bjhd->bihd", torch.where(seen, s.softmax(-1), 0), v)
    wide = torch.promote_types(q.dtype, torch.float32)
    return out, torch.where(sees[:, 0], s.to(wide).logsumexp(-1), -torch.inf)


class Slopes(nn.Module):
    """alibi_slopes, (heads,) or (batch, heads)."""

    def __init__(self, *shape: int):
        super().__init__()
        self.slopes = nn.Parameter(0.3 * torch.rand(shape))


@dataclass(frozen=True)
class FlashCase(Case):
    """A call of flash_attn_func up to its random numbers."""

    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    alibi: str | None = None  # "heads" or "batch", the shape of slopes

    def __str__(self) -> str:
        left, right = self.window_size
        return f"{super().__str__()}-l{left}-r{right}-alibi_{self.alibi}"

    @property
    def geometry(self) -> Mask:
        return Mask(*self.lengths, self.causal, self.window_size)


class FlashProblem(Problem):
    @property
    def slopes(self) -> Tensor | None:
        return None if self.bias is None else self.bias.slopes

    def dense(self) -> Tensor | None:
        """The bias of every pair, for `magnitudes`."""
        if self.bias is None:
            return None
        n_query, n_key = self.case.lengths
        d = torch.arange(n_query)[:, None] + n_key - n_query - torch.arange(n_key)
        return -self.slopes.view(-1, self.case.heads[0], 1, 1) * d.abs()

    def options(self) -> dict:
        """The options of all of flash-attn's calls."""
        case = self.case
        return {
            "causal": case.causal,
            "window_size": case.window_size,
            "softmax_scale": case.scale,
            "alibi_slopes": self.slopes,
        }


def drawn_flash(case: FlashCase) -> FlashProblem:
    (heads, kv_heads), (n_query, n_key), (dim, value_dim) = case.heads, case.lengths, case.dims
    real = torch.promote_types(case.dtype, torch.float32)

    def tensor(*shape: int) -> Tensor:
        return LAYOUTS[case.layout](torch.randn(case.batch, *shape).to(case.dtype))

    shapes = {None: None, "heads": (heads,), "batch": (case.batch, heads)}
    shape = shapes[case.alibi]
    q, k, v = (
        tensor(*shape).detach().requires_grad_()
        for shape in ((heads, n_query, dim), (kv_heads, n_key, dim), (kv_heads, n_key, value_dim))
    )
    bias = None if shape is None else Slopes(*shape).to(real)
    grad_lse = torch.randn(case.batch, heads, n_query).to(real)
    return FlashProblem(case, q, k, v, bias, tensor(heads, n_query, value_dim), grad_lse)


def by_documentation(problem: FlashProblem) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    out, lse = documented(q, k, v, problem.case.geometry, problem.scale, problem.slopes)
    return out.transpose(1, 2), lse


def by_func(problem: FlashProblem) -> tuple[Tensor, Tensor]:
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    out, lse, probabilities = flash_attn_func(q, k, v, **problem.options(), return_attn_probs=True)
    assert out.is_contiguous() or problem.case.layout != "heads_inside"
    assert probabilities is None
    return out.transpose(1, 2), lse


def check_flash(problem: FlashProblem, attend=by_func) -> None:
    """Checks that outputs and gradients follow the documentation."""
    check_results(problem, evaluate(problem, attend))


def check_results(problem: FlashProblem, ours: dict[str, Tensor]) -> None:
    before = problem.double()
    truth, baseline = (evaluate(x, by_documentation) for x in (before, problem))
    sums = magnitudes(before, problem.q.dtype)
    for name, result in ours.items():
        naive = None if problem.q.dtype == torch.float64 else baseline[name]
        assert result.dtype == baseline[name].dtype, name
        assert_close_to_float64(result, truth[name], naive, name, sums[name])
