"""The problems that the kernels are tested on, and how they are checked.

The oracle is naive attention in float64 over the bias's dense view, which does not depend on masks
and tiles. The baseline is naive attention in the dtype of the inputs, including the bias.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.attention import prepared
from biased_flash_attn.backends.reference import attention
from biased_flash_attn.forms import Geometry
from biased_flash_attn.problem import Problem as Call
from tests.support.biases import DENSE, FORMS, OF_QUERIES, SAME_DTYPE, SHIPPED, WIDE, Content
from tests.support.cases import LAYOUTS, Case
from tests.support.numerics import assert_close_to_float64


def with_leaves(call: Call) -> Call:
    """The same call, whose tensors are leaves that require gradients."""
    call = call.detached()
    for x in call.tensors():
        x.requires_grad_()
    return call


@dataclass
class Problem:
    """A case with its random numbers."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    bias: nn.Module | None
    grad_o: Tensor
    grad_lse: Tensor

    @property
    def scale(self) -> float:
        return self.case.dims[0] ** -0.5 if self.case.scale is None else self.case.scale

    def called_bias(self):
        return self.bias() if isinstance(self.bias, Content) else self.bias

    def dense(self) -> Tensor | None:
        """The bias of every pair, in float64; steps are summed in lse's precision."""
        bias, (n_query, n_key) = self.called_bias(), self.case.lengths
        if not isinstance(bias, biases.CumulativeBias):
            return None if bias is None else bias.dense(n_query, n_key)
        geometry, real = Geometry(n_query, n_key, causal=False), self.grad_lse.dtype
        form = bias.lower(geometry, real, self.q.device)
        return replace(form, sums=form.sums.to(real)).dense(geometry)

    def trained(self) -> dict[str, Tensor]:
        """The bias's parameters that require gradients."""
        own = {} if self.bias is None else dict(self.bias.named_parameters())
        return {name: x for name, x in own.items() if x.requires_grad}

    def leaves(self) -> dict[str, Tensor]:
        return {"q": self.q, "k": self.k, "v": self.v, **self.trained()}

    def double(self) -> Problem:
        """A copy of the problem in float64."""
        tensors = (self.q, self.k, self.v, self.grad_o, self.grad_lse)
        q, k, v, grad_o, grad_lse = (x.detach().clone().double() for x in tensors)
        for x in (q, k, v):
            x.requires_grad_()
        bias = None if self.bias is None else copy.deepcopy(self.bias).double()
        return type(self)(self.case, q, k, v, bias, grad_o, grad_lse)


def drawn(case: Case) -> Problem:
    (heads, kv_heads), (n_query, n_key), (dim, value_dim) = case.heads, case.lengths, case.dims
    real = torch.promote_types(case.dtype, torch.float32)

    def tensor(*shape: int) -> Tensor:
        x = LAYOUTS[case.layout](torch.randn(case.batch, *shape).to(case.dtype))
        return x.detach().requires_grad_()

    make = (FORMS | SHIPPED | DENSE | OF_QUERIES | WIDE | SAME_DTYPE)[case.bias]
    bias = make(case)
    return Problem(
        case,
        tensor(heads, n_query, dim),
        tensor(kv_heads, n_key, dim),
        tensor(kv_heads, n_key, value_dim),
        None if bias is None else bias.to(real).requires_grad_(case.trained),
        LAYOUTS[case.layout](torch.randn(case.batch, heads, n_query, value_dim).to(case.dtype)),
        torch.randn(case.batch, heads, n_query).to(real),
    )


def fused(problem: Problem, backend: str = "cpu") -> tuple[Tensor, Tensor]:
    case = problem.case
    return biased_flash_attn(
        problem.q,
        problem.k,
        problem.v,
        problem.called_bias(),
        causal=case.causal,
        window=case.window,
        scale=case.scale,
        return_lse=True,
        backend=backend,
    )


def prepared_call(
    problem: Problem, backend: str = "cpu", tolerance: float | None = None, **sequences
) -> Call:
    """The call of a problem after the preparations of the public function."""
    return prepared(
        problem.q,
        problem.k,
        problem.v,
        problem.called_bias(),
        problem.case.causal,
        problem.case.window,
        problem.case.scale,
        tolerance,
        backend,
        **sequences,
    )


def naive(problem: Problem) -> tuple[Tensor, Tensor]:
    q, k, v = problem.q, problem.k, problem.v
    return attention(q, k, v, problem.dense(), problem.case.geometry, problem.scale)


def evaluate(problem: Problem, attend=fused) -> dict[str, Tensor]:
    """o, lse and the gradients of everything that has one, by name."""
    leaves = problem.leaves()
    o, lse = attend(problem)
    grads = torch.autograd.grad((o, lse), leaves.values(), (problem.grad_o, problem.grad_lse))
    named = {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {"o": o.detach(), "lse": lse.detach(), **named}


def outputs(problem: Problem, attend=fused) -> dict[str, Tensor]:
    """o and lse, without gradients."""
    with torch.no_grad():
        return dict(zip(("o", "lse"), attend(problem), strict=True))


def of_tile(bias, n_query: int) -> Tensor | float:
    """The magnitude of the sums of a tile's steps, whose difference the bias is in the kernels: of
    all queries or, with a gain, of each.

    They are a random walk with drift. Medians, because a step that exceeds all others does not
    count: kernels keep the others exact next to it.
    """
    if not isinstance(bias, biases.CumulativeBias) or bias.steps.numel() == 0:
        return 0.0
    steps = bias.steps.detach()
    of_steps = 64 * steps.median().abs() + 8 * steps.abs().median()
    if bias.gain is None:
        return of_steps
    return of_steps * bias.gain.detach()[..., -n_query:, None].abs()


def magnitudes(
    problem: Problem, dtype: torch.dtype, of_logits: Tensor | float = 0
) -> dict[str, Tensor]:
    """The sums of absolute terms of each result, to which rounding errors in dtype are relative.

    Logits and lse are at best float32, and so is the exponential of their difference: a weight has
    an error of their magnitude times that rounding. of_logits is added to the magnitude of a logit,
    besides its product and its bias. An error of the sum of weights is an error of lse.

    NaN and infinities count as 0: finite results do not contain them.
    """
    real = torch.promote_types(dtype, torch.float32)
    coarseness = torch.finfo(real).eps / torch.finfo(dtype).eps
    tensors = problem.q, problem.k, problem.v, problem.grad_o
    q, k, v, grad_o = (x.detach().nan_to_num(0, 0, 0).abs() for x in tensors)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    bias = problem.dense()
    of_logits = of_logits + of_tile(problem.called_bias(), problem.case.lengths[0])

    with torch.no_grad():
        _, lse = naive(problem)
        lse = lse[..., None]
        s = problem.scale * problem.q @ problem.k.repeat_interleave(group, 1).mT
        size = abs(problem.scale) * q @ k.mT + of_logits
        if bias is not None:
            s, size = s + bias, size + bias.abs()
        seen = problem.case.geometry.visible() & s.isfinite() & lse.isfinite()
        p = torch.where(seen, torch.exp(s - lse), 0)
        sums = {"lse": 1 + torch.where(seen, p * size, 0).sum(-1)}

        p = torch.where(seen, p * (1 + coarseness * (size + lse.abs())), 0)
        o = p @ v
        delta = (grad_o * o).sum(-1, keepdim=True) + problem.grad_lse.abs()[..., None]
        grad_logits = p * (grad_o @ v.mT + delta)
        sums |= {"o": o, "gradient of q": abs(problem.scale) * grad_logits @ k}
        of_keys = {"k": abs(problem.scale) * grad_logits.mT @ q, "v": p.mT @ grad_o}
        for name, of_heads in of_keys.items():
            sums[f"gradient of {name}"] = of_heads.unflatten(1, (-1, group)).sum(2)

    if own := problem.trained():
        # This holds for biases that are monotonic in each parameter. These gradients are in the
        # higher precision, and computed from outputs in dtype.
        grad_bias = (grad_logits / coarseness).sum_to_size(bias.shape)
        grads = torch.autograd.grad(bias, own.values(), grad_bias, retain_graph=True)
        twice = 0
        if isinstance(problem.called_bias(), biases.CumulativeBias):
            # The terms of a query and the key at its position cancel, except for rounding if they
            # are computed twice.
            n_query, n_key = problem.case.lengths
            twice = grad_bias.diagonal(n_key - n_query, -2, -1).sum(-1).max()
        sums |= {f"gradient of {name}": g.abs() + twice for name, g in zip(own, grads, strict=True)}
    return sums


def check(case: Case, attend=fused) -> dict[str, Tensor]:
    """Checks that all results of attend for a case are as exact as required."""
    return check_problem(drawn(case), attend)


def check_problem(problem: Problem, attend=fused, evaluated=evaluate) -> dict[str, Tensor]:
    """Checks a problem's results. evaluated: `evaluate`, or `outputs` for a call without
    gradients."""
    before = problem.double()
    ours = evaluated(problem, attend)
    for name, x in problem.leaves().items():
        same = torch.equal(x.double().nan_to_num(), before.leaves()[name].nan_to_num())
        assert same, f"{name} was written to"

    truth, baseline = evaluate(before, naive), evaluate(problem, naive)
    sums = magnitudes(before, problem.q.dtype)
    for name, found in ours.items():
        assert found.dtype == baseline[name].dtype, name
        same = None if problem.q.dtype == torch.float64 else baseline[name]
        assert_close_to_float64(found, truth[name], same, name, sums[name])
    return ours


def check_beyond_float32(problem: Problem, attend=fused) -> None:
    """Like check_problem, for sums for which naive attention in float32 is too inexact."""
    before = problem.double()
    truth, sums = evaluate(before, naive), magnitudes(before, problem.q.dtype)
    for name, actual in evaluate(problem, attend).items():
        assert_close_to_float64(actual, truth[name], None, name, sums[name])
