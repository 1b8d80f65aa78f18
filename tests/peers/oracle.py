"""Naive attention, written from its definition, and the tolerance that several peers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, added: Tensor, scale: float) -> Tensor:
    """softmax(scale q k^T + added) v for q (..., H, Nq, D), and k and v with H or fewer heads.

    added is -inf where a pair is masked; the result of a query without visible keys is 0. All
    arithmetic but that of the softmax is in the dtype of q.
    """
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    logits = scale * (q @ k.mT) + added.to(q.dtype)
    logits = logits.to(torch.promote_types(q.dtype, torch.float32))
    masked = (logits == -torch.inf).all(-1, keepdim=True)
    weights = logits.masked_fill(masked, 0).softmax(-1).masked_fill(masked, 0)
    return weights.to(q.dtype) @ v


def below_diagonal(n_query: int, n_key: int, offset: int) -> Tensor:
    """0 where key j <= i + offset, and -inf elsewhere, (n_query, n_key) float64."""
    visible = torch.arange(n_key) <= torch.arange(n_query)[:, None] + offset
    return torch.where(visible, 0.0, -torch.inf).double()


def assert_near(actual: Tensor, exact: Tensor, ratio: float, what: str) -> None:
    """The root mean square of the error is at most ratio times that of the exact values."""
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, not {exact.shape}"
    assert actual.isfinite().all(), f"{what}: not finite"
    error, size = (x.square().mean().sqrt().item() for x in (actual.double() - exact, exact))
    assert error <= ratio * size, f"{what}: error {error:.3g}, allowed {ratio * size:.3g}"


def assert_within(
    ours: Callable[..., Tensor],
    naive: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    *,
    factor: float,
    atol: float,
    rtol: float = 0.0,
    gradients: bool = True,
    of_gradients: tuple[float, float] | None = None,
) -> None:
    """The largest error of the output and of each gradient is at most factor times that of naive
    arithmetic in the dtype of the inputs, plus atol, plus rtol times the largest value.

    of_gradients: the factor and atol of gradients, if they are others.
    """
    exactly = [x.double() for x in inputs]
    outputs, cotangent = [], None
    for function, given in ((ours, inputs), (naive, exactly), (naive, inputs)):
        leaves = [x.detach().requires_grad_(gradients) for x in given]
        o = function(*leaves)
        results = [o]
        if gradients:
            cotangent = torch.randn_like(o) if cotangent is None else cotangent
            of_o = cotangent.to(o.dtype)
            results += torch.autograd.grad(o, leaves, of_o, materialize_grads=True)
        outputs.append([x.detach().double() for x in results])
    for n, (actual, exact, rounded) in enumerate(zip(*outputs, strict=True)):
        what = "output" if n == 0 else f"gradient of input {n - 1}"
        assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, not {exact.shape}"
        assert actual.isfinite().all(), f"{what}: not finite"
        error, allowed = ((x - exact).abs().amax().item() for x in (actual, rounded))
        times, plus = (factor, atol) if n == 0 or of_gradients is None else of_gradients
        bound = times * allowed + plus + rtol * exact.abs().amax().item()
        assert error <= bound, f"{what}: error {error:.3g}, allowed {bound:.3g}"
