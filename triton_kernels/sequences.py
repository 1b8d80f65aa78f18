"""Restricts the operands of a kernel to one sequence, if sequences are ranges of rows.

A kernel passes the restricted operands to a function that computes one sequence as if there were no
others: rows start at 0, and lengths are those of the sequence. Without sequences, operands are
returned unchanged. Operands that are None become (), because some versions of Triton cannot return
None from functions.

Restricted operands must be passed as arguments directly. If they are assigned to variables or, in
some versions of Triton, returned from functions, their constexpr fields lose their compile-time
values. Therefore problems and biases are assembled by classes, whose constructors the compiler
evaluates, from the tensors that functions return.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from .operands import Bias, Factors, Problem, Strided

COLUMNS = tl.constexpr(5)
FIRST_QUERY, N_QUERY, FIRST_KEY, N_KEY, SHIFT = map(tl.constexpr, range(COLUMNS.value))


class SequenceProblem(Problem):
    """A problem with n_query, n_key and shift replaced by `lengths`."""

    def __new__(cls, problem, lengths):
        replaced = dict(zip(("n_query", "n_key", "shift"), lengths, strict=True))
        return Problem(**dict(zip(Problem._fields, problem, strict=True)) | replaced)


class PerToken(NamedTuple):
    """The operands of a bias that have values per query, key or pair; () for those that are
    absent."""

    sums: Strided | tuple
    dense: Strided | tuple
    gain: Strided | tuple
    high: Strided | tuple
    low: Strided | tuple
    query_vectors: Strided | tuple
    key_vectors: Strided | tuple
    query_factors: Factors | tuple
    key_factors: Factors | tuple


class SequenceBias(Bias):
    """A bias with its per-token operands replaced."""

    def __new__(cls, bias, per_token):
        operands = zip(PerToken._fields, per_token, strict=True)
        replaced = {name: x for name, x in operands if len(x)}
        return Bias(**dict(zip(Bias._fields, bias, strict=True)) | replaced)


@triton.jit
def number(problem, b, COLUMN: tl.constexpr):
    """Loads one entry of the record of sequence b."""
    return tl.load(problem.sequences + (COLUMNS * b + COLUMN)).to(tl.int32)


@triton.jit
def is_past_end(problem, b, first, COLUMN: tl.constexpr):
    """Whether row `first` is beyond the end of sequence b, which may be shorter than others."""
    beyond = False
    if problem.sequences is not None:
        beyond = first >= number(problem, b, COLUMN)
    return beyond


@triton.jit
def sequence_lengths(problem, b):
    """Returns the number of queries, the number of keys and the shift of sequence b."""
    lengths = problem.n_query, problem.n_key, problem.shift
    if problem.sequences is not None:
        lengths = number(problem, b, N_QUERY), number(problem, b, N_KEY), number(problem, b, SHIFT)
    return lengths


@triton.jit
def from_row(x, problem, b, FIRST: tl.constexpr):
    return x if problem.sequences is None else rows_from(x, number(problem, b, FIRST))


@triton.jit
def sequence_queries(x, problem, b):
    """Restricts x (B, H, Nq, ...) to the queries of sequence b."""
    return () if x is None else from_row(x, problem, b, FIRST_QUERY)


@triton.jit
def sequence_keys(x, problem, b):
    """Restricts x (B, H, Nk, ...) to the keys of sequence b."""
    return () if x is None else from_row(x, problem, b, FIRST_KEY)


@triton.jit
def sequence_pairs(x, problem, b):
    """Restricts x (B, H, Nq, Nk) to the pairs of sequence b."""
    return () if x is None else x if problem.sequences is None else pairs_from(x, problem, b)


@triton.jit
def pairs_from(x, problem, b):
    first = tl.cast(number(problem, b, FIRST_QUERY), tl.int64) * x.row
    return Strided(x.start + (first + number(problem, b, FIRST_KEY)), x.batch, x.head, x.row)


@triton.jit
def rows_from(x, row):
    return Strided(x.start + tl.cast(row, tl.int64) * x.row, x.batch, x.head, x.row)


@triton.jit
def factors_from(x, row):
    return Factors(x.start + tl.cast(row, tl.int64) * x.row, x.batch, x.head, x.row, x.side)


@triton.jit
def per_token_operands(bias, problem, b):
    """Returns the operands that SequenceBias replaces, restricted to sequence b."""
    return PerToken(
        sums=sequence_keys(bias.sums, problem, b),
        dense=sequence_pairs(bias.dense, problem, b),
        gain=sequence_queries(bias.gain, problem, b),
        high=sequence_keys(bias.high, problem, b),
        low=sequence_keys(bias.low, problem, b),
        query_vectors=sequence_queries(bias.query_vectors, problem, b),
        key_vectors=sequence_keys(bias.key_vectors, problem, b),
        query_factors=sequence_factors(bias.query_factors, bias, problem, b, FIRST_QUERY),
        key_factors=sequence_factors(bias.key_factors, bias, problem, b, FIRST_KEY),
    )


@triton.jit
def sequence_factors(x, bias, problem, b, FIRST: tl.constexpr):
    factors = ()
    # The factors of tables are per distance, not per token.
    if x is not None and bias.table is None:
        factors = x if problem.sequences is None else factors_from(x, number(problem, b, FIRST))
    return factors
