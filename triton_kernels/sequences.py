"""One sequence's share of a problem whose sequences are ranges of the rows of its tensors.

A kernel hands its work to a function that is given the shares of one sequence, and sees it as if
there were no others: rows begin at 0, and lengths are its own. Where all rows of a batch entry are
one sequence, shares are what they are shares of.

Shares are arguments, never variables: assigned or, up to some version of Triton, returned, what is
known at compile time is so no longer. So problems and biases are put together by classes, which the
compiler calls as they are, from what functions return.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .operands import Bias, Factors, Problem, Rows

COLUMNS = tl.constexpr(5)
FIRST_QUERY, N_QUERY, FIRST_KEY, N_KEY, SHIFT = map(tl.constexpr, range(COLUMNS.value))


class OwnProblem(Problem):
    """A problem with numbers of queries and keys, and a shift, of its own."""

    def __new__(cls, problem, lengths):
        own = dict(zip(("n_query", "n_key", "shift"), lengths, strict=True))
        return Problem(**dict(zip(Problem._fields, problem, strict=True)) | own)


class OwnBias(Bias):
    """A bias with the rows of own_rows."""

    def __new__(cls, bias, rows):
        names = "terms", "gain", "high", "low", "query_factors", "key_factors"
        own = {name: x for name, x in zip(names, rows, strict=True) if len(x)}
        return Bias(**dict(zip(Bias._fields, bias, strict=True)) | own)


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
def own_lengths(problem, b):
    """Number of queries, number of keys, shift."""
    lengths = problem.n_query, problem.n_key, problem.shift
    if problem.sequences is not None:
        lengths = number(problem, b, N_QUERY), number(problem, b, N_KEY), number(problem, b, SHIFT)
    return lengths


@triton.jit
def own_queries(x, problem, b):
    return x if problem.sequences is None else rows_from(x, number(problem, b, FIRST_QUERY))


@triton.jit
def own_keys(x, problem, b):
    return x if problem.sequences is None else rows_from(x, number(problem, b, FIRST_KEY))


@triton.jit
def own_pairs(x, problem, b):
    """Of numbers of pairs, (B, H, Nq, Nk)."""
    return x if problem.sequences is None else pairs_from(x, problem, b)


@triton.jit
def pairs_from(x, problem, b):
    first = tl.cast(number(problem, b, FIRST_QUERY), tl.int64) * x.row
    return Rows(x.start + (first + number(problem, b, FIRST_KEY)), x.batch, x.head, x.row)


@triton.jit
def rows_from(x, row):
    return Rows(x.start + tl.cast(row, tl.int64) * x.row, x.batch, x.head, x.row)


@triton.jit
def factors_from(x, row):
    return Factors(x.start + tl.cast(row, tl.int64) * x.row, x.batch, x.head, x.row, x.side)


@triton.jit
def own_rows(bias, problem, b):
    """The terms, gain, high, low and factors that a bias has a query or key of; () for others."""
    terms, gain, high, low, query_factors, key_factors = (), (), (), (), (), ()
    if bias.form == "cumulative":
        terms = own_keys(bias.terms, problem, b)
        high, low = own_keys(bias.high, problem, b), own_keys(bias.low, problem, b)
    if bias.form == "dense":
        terms = own_pairs(bias.terms, problem, b)
    if bias.gain is not None:
        gain = own_queries(bias.gain, problem, b)
    # Those of tables belong to distances.
    if bias.query_factors is not None and bias.form != "distance":
        query_factors = own_factors(bias.query_factors, problem, b, FIRST_QUERY)
        key_factors = own_factors(bias.key_factors, problem, b, FIRST_KEY)
    return terms, gain, high, low, query_factors, key_factors


@triton.jit
def own_factors(x, problem, b, FIRST: tl.constexpr):
    return x if problem.sequences is None else factors_from(x, number(problem, b, FIRST))
