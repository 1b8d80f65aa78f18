"""What is decided of a kernel, from the problem alone, before its operands are made."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from ... import problem as calls
from .. import configs
from ..configs import Config, Features
from ..operands import Rows
from ..processors import processor
from .forms import ONE_BY_ONE, kernels_of


@dataclass(frozen=True)
class Configured:
    """The configuration of a kernel, and which of its ways through the tiles it takes.

    factored: whole tiles take the bias from products of factors (bias/factors.py).
    ahead: these products are computed a tile before they are needed.
    rows_near, rows_alike: see operands.Problem.
    """

    config: Config
    block_d: int
    block_dv: int
    factored: bool = False
    ahead: bool = False
    rows_near: bool = False
    rows_alike: bool = False

    @property
    def blocks(self) -> dict[str, int]:
        """What of it is an argument of the kernel."""
        return {
            "BLOCK_M": self.config.block_m,
            "BLOCK_N": self.config.block_n,
            "BLOCK_D": self.block_d,
            "BLOCK_DV": self.block_dv,
        }


def configure(
    kernel: str,
    problem: calls.Problem,
    through: tuple[Rows, Rows, int] | None = None,
    *,
    trained: bool = False,
) -> Configured:
    """For a field of the rows of `configs`, or "trim".

    through: the two tensors whose rows the kernel goes through, and how many these are. trained:
    whether gradients of sums are computed.
    """
    geometry, tensors = problem.geometry, problem.form.tensors
    block_d, block_dv = (
        max(16, triton.next_power_of_2(x.shape[3])) for x in (problem.q, problem.v)
    )
    far = through is not None and _are_far(*through)
    trims = kernel == "trim"
    features = Features(
        ONE_BY_ONE if trims else problem.form.name,
        len(tensors) > 1,
        problem.plan is not None,
        trained,
        geometry.causal,
        geometry.window is not None,
        far,
        problem.q.dtype,
    )
    width, with_sequences = max(block_d, block_dv), problem.sequences is not None
    row = "forward" if trims else kernel
    config = configs.choose(row, processor(), width, features, with_sequences)
    if trims:
        config = replace(config, block_n=max(16, config.block_n // 2))
    # No registers are left for products ahead where offsets take 64 bits nor, in forward passes,
    # where the two tensors have offsets of their own.
    near = through is not None and config.ahead and not far
    alike = near and through[0].row == through[1].row
    # float32 has no matrix units that are exact: a column there costs as much as the bias itself.
    # Wider heads leave no registers for the sums of dS times factors.
    has_room = (
        problem.q.dtype != torch.float32 and max(problem.q.shape[3], problem.v.shape[3]) <= 128
    )
    has_room = has_room and problem.scale > 0 and geometry.n_key > 0
    may_be_factored = kernels_of(problem).may_be_factored(config.block_m, *tensors)
    return Configured(
        config,
        block_d,
        block_dv,
        factored=has_room and may_be_factored and not trims,
        ahead=alike if kernel == "forward" else near,
        rows_near=near,
        rows_alike=alike,
    )


def _are_far(x: Rows, y: Rows, n: int) -> bool:
    """Whether offsets in a head's n rows of x or of y, and in a tile behind them, take 64 bits."""
    return (n + configs.LARGEST_TILE) * max(x.row, y.row) >= 2**31
