"""Computes the factors of a bias (bias/factors.py, bias/table_polynomials.py)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.language import constexpr

from ...sequences import Sequences
from .. import configs
from ..bias.factor_kernels import key_factors_kernel, query_factors_kernel
from ..bias.table_polynomials import TABLE_ROWS, interpolation, table_factors_kernel
from ..operands import Bias, Factors, Problem, per_head, strided
from ..primitives import FACTORS
from ..processors import processor
from .configured import Configured
from .options import OPTIONS


def with_factors(
    bias: Bias,
    problem: Problem,
    configured: Configured,
    sequences: Sequences | None,
    lse_in_base_2: Tensor | None = None,
) -> Bias:
    """Returns the bias with the factors for the tiles of a configuration, if that is factored.

    The factors of queries include lse_in_base_2 if it is given.
    """
    if not configured.factored:
        return bias
    config = configured.config
    columns = configs.sum_columns(processor())
    flags = {
        "factored": True,
        "only_far": bias.table is not None or bias.vector_tables is not None,
        "ahead": configured.ahead,
        "sum_columns": columns,
    }
    bias = bias._replace(**{name: constexpr(x) for name, x in flags.items()})
    if bias.vector_tables is not None:
        return bias
    if bias.table is not None:
        return _with_table_factors(bias, problem, config.block_m)

    lse = None if lse_in_base_2 is None else strided(lse_in_base_2)
    per_query = [x for x in (lse_in_base_2, bias.gain and bias.gain.start) if x is not None]
    if per_query:
        shape = (*per_query[0].shape[:2], problem.n_query)
        apart = sequences and (sequences.query_rows, sequences.is_packed)
        query_factors = _factors(
            query_factors_kernel, shape, config.block_m, apart, bias, problem, lse
        )
    else:
        heads = (1, 1) if bias.slopes is None else bias.slopes.start.shape[:2]
        shape = (*heads, config.block_m)
        query_factors = _row_independent(query_factors_kernel, shape, bias, problem, lse)
    if bias.sums is None:
        key_factors = _row_independent(key_factors_kernel, (1, 1, config.block_n), bias, problem)
    else:
        shape = (*bias.sums.start.shape[:2], problem.n_key)
        apart = sequences and (sequences.key_rows, sequences.is_packed)
        key_factors = _factors(key_factors_kernel, shape, config.block_n, apart, bias, problem)
    return bias._replace(query_factors=query_factors, key_factors=key_factors)


def _row_independent(kernel, shape, bias: Bias, problem: Problem, *more) -> Factors:
    """Returns factors that are the same for every block of rows of every sequence."""
    problem = problem._replace(sequences=None)
    return _factors(kernel, shape, shape[2], None, bias, problem, *more)._replace(row=0)


def _factors(kernel, shape, block: int, entry_rows, bias: Bias, problem: Problem, *more) -> Factors:
    """Runs a kernel that writes factors in blocks of rows, once per side: (sides, *shape, FACTORS).

    entry_rows: with sequences, the number of rows of a batch entry, and whether they are packed.
    Every sequence has room for one more block than its rows, into which its last block may extend.
    """
    sides = (1,) if problem.causal.value else (1, -1)
    batch, heads, length = shape
    blocks = triton.cdiv(length, block)
    if entry_rows is None:
        total = apart = blocks * block
        total *= batch
    else:
        n_rows, is_packed = entry_rows
        batch = len(problem.sequences)
        apart = block if is_packed else block + n_rows
        total = batch * apart + (n_rows if is_packed else 0)
    factors = _empty_factors(bias, len(sides), heads, total)
    made = [
        Factors(
            x,
            0 if batch == 1 else apart * x.stride(1),
            0 if heads == 1 else x.stride(0),
            x.stride(1),
        )
        for x in factors
    ]
    for part, side in zip(made, sides, strict=True):
        kernel[(batch, heads, blocks)](part, bias, problem, *more, block, side, **OPTIONS)
    return made[0]._replace(side=factors.stride(0))


def _with_table_factors(bias: Bias, problem: Problem, block_m: int) -> Bias:
    batch, heads, length = bias.table.start.shape
    row_factors = _empty_factors(bias, 1, 1, block_m)
    key_factors = _empty_factors(bias, batch, heads, length - block_m + 1)
    blocks = triton.cdiv(key_factors.shape[2], TABLE_ROWS)
    unfactored = key_factors.new_empty((batch, heads, blocks, 2), dtype=torch.int32)
    nodes, weights = interpolation(block_m)
    table_factors_kernel[batch, heads, blocks](
        strided(row_factors),
        strided(key_factors),
        strided(unfactored),
        bias,
        problem,
        length,
        ROWS=block_m,
        BLOCK=TABLE_ROWS,
        NODES=nodes,
        INTERPOLATION=weights,
        **OPTIONS,
    )
    far = torch.stack([unfactored[..., 1].amax(2) + 1, unfactored[..., 0].amin(2) - 1], 2)
    return bias._replace(
        query_factors=Factors(*per_head(row_factors)),
        key_factors=Factors(*per_head(key_factors)),
        far=per_head(far),
    )


def _empty_factors(bias: Bias, *shape: int) -> Tensor:
    operand = bias.slopes or bias.sums or bias.table
    return operand.start.new_empty((*shape, FACTORS.value), dtype=torch.bfloat16)
