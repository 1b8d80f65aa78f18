"""Checks before timing: outputs and gradients against float64 at a small length."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bench.common.implementations import make_bias, ours
from bench.common.layer import HEAD_DIM, Inputs, Training, draw
from biased_flash_attn.backends.reference import attention
from biased_flash_attn.exactness import compared
from biased_flash_attn.forms import Geometry

LENGTH = 330  # several tiles, the last one partial
SKIPPING_LENGTH = 4000  # most tiles are skipped
CANCELLED = 1e-12  # the float64 residual of sums that cancel


@cache
def check(bias: str | None, dtype: torch.dtype, head_dim: int = HEAD_DIM) -> None:
    """Fails if our CPU kernels are not exact."""
    check_exact(draw(LENGTH, dtype, head_dim), bias, "cpu")


def check_exact(inputs: Inputs, bias: str | None, backend: str) -> None:
    """Fails if our errors exceed their bounds; gradients sum over all queries."""
    exact = ours(inputs.to(torch.float64), bias, backend="reference")()
    found, baseline, sizes = ours(inputs, bias, backend)(), naive(inputs, bias)(), sizes_of(exact)
    dtype, n_queries = inputs.q.dtype, inputs.q[..., 0].numel() // inputs.q.shape[1]
    for name, x in exact.items():
        results = found[name], x, baseline[name], sizes[name]
        error, bound = compared(*results, dtype, float32_roundings=n_queries)
        assert error <= bound, f"{bias}, {dtype}: error of {name}: {error:.2g} > {bound:.2g}"


def check_float64(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fails if float64 results differ by more than float32 constants of one side explain."""
    for name, size in sizes_of(expected).items():
        difference = (found[name] - expected[name]).abs().max()
        assert difference <= 1e-6 * size, f"another result: {name}"


def sizes_of(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The largest entry of each float64 tensor, or of any tensor if it is a rounding error."""
    sizes = {name: t.abs().max() for name, t in values.items()}
    largest = max(sizes.values())
    return {name: x if x > CANCELLED * largest else largest for name, x in sizes.items()}


@cache
def check_skipping(bias: str, dtype: torch.dtype) -> None:
    """Fails if results at the default tolerance differ by more than a rounding from those at 0.

    The permitted error of gradients is relative to their largest entry.
    """
    inputs = draw(SKIPPING_LENGTH, dtype)
    exact = ours(inputs, bias, tolerance=0.0)()
    for name, result in ours(inputs, bias)().items():
        allowed = 4 * torch.finfo(dtype).eps * exact[name].abs().max()
        error = (result - exact[name]).abs().max()
        assert error <= allowed, f"{bias}, {dtype}: {name} differs by {error:.2g} > {allowed:.2g}"


def check_other(side, bias: str, dtype: torch.dtype) -> None:
    """Fails if the results of an alternative differ by more than rounding in dtype."""
    inputs = draw(LENGTH, dtype)
    found, expected = side(inputs, bias)()["o"], ours(inputs, bias)()["o"]
    torch.testing.assert_close(found, expected, rtol=0, atol=64 * torch.finfo(dtype).eps)


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Fails if results differ by much more than the errors of both sides."""
    for name, x in expected.items():
        expected_norm = x.float().norm()  # not in float64, which would need much memory
        difference = float((found[name].float() - x.float()).norm() / expected_norm)
        # The gradient of a parameter sums signed terms of all pairs, which largely cancel.
        allowed = 0.2 if name in ("o", "q", "k", "v") else 0.5
        assert difference <= allowed, f"different results: {name} differs by {difference:.2g}"


def naive(inputs: Inputs, bias: str | None) -> Training:
    module = make_bias(bias, inputs)
    length, scale = inputs.q.shape[2], inputs.q.shape[3] ** -0.5

    def attend() -> Tensor:
        with inputs.q.device:  # the device of dense() for biases without parameters
            dense = module and module(inputs.x).dense(length, length)
        return attention(inputs.q, inputs.k, inputs.v, dense, Geometry(length, length), scale)[0]

    return Training(inputs, attend, module)
