"""One sequence's share of a problem whose sequences are ranges of the rows of its tensors.

A kernel hands its work to a function that is given the shares of one sequence, and sees it as if
there were no others: rows begin at 0, and lengths are its own. Where all rows of a batch entry are
one sequence, shares are what they are shares of.

Shares are arguments, never variables: assigned, what is known at compile time is so no longer.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .operands import Bias, Factors, Problem, Rows

COLUMNS = tl.constexpr(5)
FIRST_QUERY, N_QUERY, FIRST_KEY, N_KEY, SHIFT = map(tl.constexpr, range(COLUMNS.value))


@triton.jit
def number(problem, b, COLUMN: tl.constexpr):
    return tl.load(problem.sequences + (COLUMNS * b + COLUMN)).to(tl.int32)


@triton.jit
def is_beyond(problem, b, first, COLUMN: tl.constexpr):
    """Whether sequence b has no block of rows from `first` on, as longer ones do."""
    beyond = False
    if problem.sequences is not None:
        beyond = first >= number(problem, b, COLUMN)
    return beyond


@triton.jit
def own_problem(problem, b):
    return problem if problem.sequences is None else with_lengths(problem, b)


@triton.jit
def with_lengths(problem, b):
    return Problem(
        problem.heads,
        problem.group,
        number(problem, b, N_QUERY),
        number(problem, b, N_KEY),
        problem.window,
        problem.scale,
        problem.scale_in_base_2,
        problem.head_dim,
        problem.value_dim,
        problem.causal,
        problem.windowed,
        problem.positive_scale,
        problem.longest_query,
        number(problem, b, SHIFT),
        problem.plan,
        problem.sequences,
        problem.rows_alike,
    )


@triton.jit
def own_queries(x, problem, b):
    return x if problem.sequences is None else rows_from(x, number(problem, b, FIRST_QUERY))


@triton.jit
def own_keys(x, problem, b):
    return x if problem.sequences is None else rows_from(x, number(problem, b, FIRST_KEY))


@triton.jit
def rows_from(x, row):
    return Rows(x.start + tl.cast(row, tl.int64) * x.row, x.batch, x.head, x.row)


@triton.jit
def factors_from(x, row):
    return Factors(x.start + tl.cast(row, tl.int64) * x.row, x.batch, x.head, x.row, x.side)


@triton.jit
def own_bias(bias, problem, b):
    return bias if problem.sequences is None else with_own_rows(bias, problem, b)


@triton.jit
def with_own_rows(bias, problem, b):
    """What a bias has a query or key of. Tables, and their factors, belong to distances."""
    return Bias(
        bias.form,
        bias.squared,
        bias.factored,
        own_keys(bias.terms, problem, b) if bias.form == "cumulative" else bias.terms,
        None if bias.gain is None else own_queries(bias.gain, problem, b),
        None if bias.high is None else own_keys(bias.high, problem, b),
        None if bias.low is None else own_keys(bias.low, problem, b),
        own_query_factors(bias, problem, b),
        own_key_factors(bias, problem, b),
        bias.far,
        bias.ahead,
    )


@triton.jit
def own_query_factors(bias, problem, b):
    if bias.query_factors is None or bias.form == "distance":
        return bias.query_factors
    else:
        return factors_from(bias.query_factors, number(problem, b, FIRST_QUERY))


@triton.jit
def own_key_factors(bias, problem, b):
    if bias.key_factors is None or bias.form == "distance":
        return bias.key_factors
    else:
        return factors_from(bias.key_factors, number(problem, b, FIRST_KEY))
