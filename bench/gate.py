"""What is to be timed must be right: outputs and gradients against float64, at a small length."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from biased_flash_attn.cli.accuracy import Exact, errors, largest_entries
from biased_flash_attn.forms import Geometry
from biased_flash_attn.reference import attention
from layer import HEAD_DIM, Inputs, Training, draw
from sides import make_bias, ours

LENGTH = 330  # several tiles, the last one partial
SKIPPING_LENGTH = 4000  # most of its tiles are left out


@cache
def check(bias: str | None, dtype: torch.dtype, head_dim: int = HEAD_DIM) -> None:
    """Fails when our errors exceed twice those of naive attention in dtype, plus rounding.

    Rounding is that of the result to dtype, and of a sum in float32 over all queries.
    """
    inputs = draw(LENGTH, dtype, head_dim)
    values = ours(inputs.to(torch.float64), bias, backend="reference")()
    exact = Exact(values, largest_entries(values))
    rounding = torch.finfo(dtype).eps + LENGTH * torch.finfo(torch.float32).eps
    naive_errors = errors(naive(inputs, bias)(), exact)
    for name, error in errors(ours(inputs, bias)(), exact).items():
        allowed = 2 * naive_errors[name] + rounding
        assert error <= allowed, f"{bias}, {dtype}: {name} errs by {error:.2g} > {allowed:.2g}"


@cache
def check_skipping(bias: str, dtype: torch.dtype) -> None:
    """Fails when results at the default tolerance differ by more than a rounding from those at 0.

    Gradients are as exact as the sums that they are made from are large.
    """
    inputs = draw(SKIPPING_LENGTH, dtype)
    exact = ours(inputs, bias, tolerance=0.0)()
    for name, result in ours(inputs, bias)().items():
        allowed = 4 * torch.finfo(dtype).eps * exact[name].abs().max()
        error = (result - exact[name]).abs().max()
        assert error <= allowed, f"{bias}, {dtype}: {name} differs by {error:.2g} > {allowed:.2g}"


def check_other(side, bias: str, dtype: torch.dtype) -> None:
    """Fails when the other side of a ratio computes something else, up to rounding in dtype."""
    inputs = draw(LENGTH, dtype)
    found, expected = side(inputs, bias)()["o"], ours(inputs, bias)()["o"]
    torch.testing.assert_close(found, expected, rtol=0, atol=64 * torch.finfo(dtype).eps)


def naive(inputs: Inputs, bias: str | None) -> Training:
    module = make_bias(bias, inputs)
    scale = inputs.q.shape[3] ** -0.5

    def attend() -> Tensor:
        dense = module and module(inputs.x).dense(LENGTH, LENGTH)
        return attention(inputs.q, inputs.k, inputs.v, dense, Geometry(LENGTH, LENGTH), scale)[0]

    return Training(inputs, attend, module)
