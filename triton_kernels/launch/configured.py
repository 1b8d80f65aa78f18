"""Chooses a kernel's configuration from the problem, before its operands are made."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from ... import problem as calls
from .. import configs
from ..configs import Config, Features
from ..forms import PAIRWISE, kernels_of
from ..operands import Strided
from ..processors import Family, processor


@dataclass(frozen=True)
class Configured:
    """The configuration of a kernel, and which variants of its main loop it uses.

    factored: in unmasked tiles, the bias is a product of factors (bias/factors.py).
    ahead: these products are computed one tile ahead.
    narrow_offsets, same_row_stride: see operands.Problem.
    """

    config: Config
    block_d: int
    block_dv: int
    factored: bool = False
    ahead: bool = False
    narrow_offsets: bool = False
    same_row_stride: bool = False

    @property
    def blocks(self) -> dict[str, int]:
        """The block sizes, as keyword arguments of the kernel."""
        return {
            "BLOCK_M": self.config.block_m,
            "BLOCK_N": self.config.block_n,
            "BLOCK_D": self.block_d,
            "BLOCK_DV": self.block_dv,
        }


def configure(
    kernel: str,
    problem: calls.Problem,
    streamed: tuple[Strided, Strided, int] | None = None,
    *,
    trained: bool = False,
) -> Configured:
    """Returns the configuration of a kernel: a field of `configs.Row`, or "trim".

    streamed: the two tensors over whose rows the kernel iterates, and the number of these rows.
    trained: whether gradients of prefix sums are computed.
    """
    geometry, tensors = problem.geometry, problem.form.tensors
    block_d, block_dv = (
        max(16, triton.next_power_of_2(x.shape[3])) for x in (problem.q, problem.v)
    )
    wide = streamed is not None and _needs_wide_offsets(*streamed)
    kernels, trims = kernels_of(problem), kernel == "trim"
    features = Features(
        problem.form.name if kernels.function or kernels.tables or not trims else PAIRWISE,
        len(tensors) > 1,
        problem.plan is not None,
        trained,
        geometry.causal,
        geometry.window is not None,
        wide,
        problem.q.dtype,
    )
    width, with_sequences = max(block_d, block_dv), problem.sequences is not None
    row = "forward" if trims else kernel
    ranks = kernels.padded_ranks(tensors)
    config = configs.choose(row, processor(), width, features, with_sequences, ranks)
    if trims:
        config = replace(config, block_n=max(16, config.block_n // 2))
    # Computing products one tile ahead spills registers where offsets take 64 bits and, in forward
    # passes, where the two tensors have different row strides.
    narrow = streamed is not None and config.ahead and not wide
    same_stride = narrow and streamed[0].row == streamed[1].row
    # float32 has no exact matrix units: there, a column of factors costs as much as the bias
    # itself. Wider heads leave no registers for the sums of dS times factors.
    has_room = (
        problem.q.dtype != torch.float32 and max(problem.q.shape[3], problem.v.shape[3]) <= 128
    )
    has_room = has_room and problem.scale > 0 and geometry.n_key > 0
    factored = has_room and kernels.may_be_factored(config.block_m, *tensors) and not trims
    if factored and kernels.tables is None and processor().family is Family.BLACKWELL:
        # The pipeliner of Triton 3.9 fences the copies of factors before it waits for them.
        config = replace(config, num_stages=1)
    return Configured(
        config,
        block_d,
        block_dv,
        factored=factored,
        ahead=same_stride if kernel == "forward" else narrow,
        narrow_offsets=narrow,
        same_row_stride=same_stride,
    )


def _needs_wide_offsets(x: Strided, y: Strided, n: int) -> bool:
    """Whether offsets within the n rows of a head of x or y, padded by a tile, take 64 bits."""
    return (n + configs.LARGEST_TILE) * max(x.row, y.row) >= 2**31
