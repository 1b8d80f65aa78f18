"""Sequences that are decoded in steps, and what one call over the whole of them gives."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from biased_flash_attn import KVCache, biased_flash_attn_with_kvcache, biases
from tests.support.biases import (
    ContextBias,
    Dense,
    FreeFactors,
    SlopesOfSequences,
    Steps,
    of_rows,
)
from tests.support.numerics import assert_close_to_float64
from tests.support.problems import Problem, magnitudes, naive

STORAGES = ("contiguous", "paged", "shuffled", "fixed")


def make_cache(problem: Problem, storage: str, page_size: int = 16) -> KVCache:
    """A cache for a problem's keys: with default pages, small ones that the cache hands out or that
    a random block table does, or all of a fixed number."""
    case = problem.case
    kwargs = {"dtype": case.dtype, "window": case.window}
    sizes = (case.batch, case.heads[1], *case.dims)
    if storage == "contiguous":
        return KVCache(*sizes, **kwargs)
    columns = -(-case.lengths[1] // page_size)
    if case.window is not None:
        columns = -(-case.window // page_size) + 2
    pages = case.batch * columns
    if storage == "shuffled":
        kwargs["block_table"] = torch.randperm(pages).view(columns, case.batch).T
    if storage != "paged":
        kwargs["pages"] = pages
    return KVCache(*sizes, **kwargs, page_size=page_size)


def bias_of(problem: Problem, tokens: slice):
    """The bias that a call is given with some tokens of a problem."""
    bias = problem.bias
    if isinstance(bias, ContextBias):
        return bias.module(bias.x[:, tokens])
    if isinstance(bias, Steps):
        gain = None if bias.gain is None else bias.gain[..., tokens]
        return biases.CumulativeBias(bias.steps[..., tokens], gain, bias.kernel)
    if isinstance(bias, Dense):
        return biases.DenseBias(bias.tensor[..., tokens, : tokens.stop])
    if isinstance(bias, FreeFactors):
        return of_rows(bias(), tokens, tokens)
    return bias


def bias_at(problem: Problem, positions: list[int]):
    """The bias of one token of each sequence, at positions of their own."""
    bias = problem.bias
    at = list(enumerate(positions))
    if isinstance(bias, FreeFactors):
        one = [(slice(i, i + 1), slice(i, i + 1), slice(b, b + 1)) for b, i in at]
        each = [of_rows(bias(), *rows) for rows in one]
        names = ("query_factors", "key_factors")
        rows = {name: [getattr(x, name) for x in each] for name in names}
        return replace(
            each[0], **{name: None if x[0] is None else torch.cat(x) for name, x in rows.items()}
        )
    if not isinstance(bias, Steps):
        return bias
    steps, gain = (
        None if x is None else torch.stack([x[b % len(x), :, i, None] for b, i in at])
        for x in (bias.steps, bias.gain)
    )
    return biases.CumulativeBias(steps, gain, bias.kernel)


def sequence(problem: Problem, b: int, length: int) -> Problem:
    """The first tokens of one sequence, as a problem of its own."""
    bias, one = copy.deepcopy(problem.bias), slice(b, b + 1)
    if isinstance(bias, Steps):
        gain = None if bias.gain is None else bias.gain[one, :, :length]
        bias = Steps(bias.steps[min(b, len(bias.steps) - 1), None, :, :length], gain, bias.kernel)
    elif isinstance(bias, FreeFactors):
        bias.keep_rows(one, length)
    elif isinstance(bias, SlopesOfSequences):
        bias.slopes = nn.Parameter(bias.slopes[one])
    case = replace(problem.case, batch=1, lengths=(length, length))
    tensors = (x[one, :, :length] for x in (problem.q, problem.k, problem.v))
    return Problem(
        case, *tensors, bias, problem.grad_o[one, :, :length], problem.grad_lse[one, :, :length]
    )


def chunks(length: int, sizes: Iterable[int]) -> Iterator[slice]:
    """Slices of so many tokens, the sizes repeated."""
    first = 0
    for size in itertools.cycle(sizes):
        if first >= length:
            return
        yield slice(first, min(first + size, length))
        first += size


@torch.no_grad()
def decoded(
    problem: Problem,
    cache: KVCache,
    sizes: Iterable[int],
    backend: str = "cpu",
    wrapped: Callable = lambda bias: bias,
    **options,
) -> tuple[Tensor, Tensor]:
    """o and lse of all tokens of a problem, appended to a cache chunk by chunk.

    wrapped: makes of the bias what is passed.
    """
    steps = [
        biased_flash_attn_with_kvcache(
            problem.q[:, :, tokens],
            cache,
            problem.k[:, :, tokens],
            problem.v[:, :, tokens],
            wrapped(bias_of(problem, tokens)),
            scale=problem.case.scale,
            return_lse=True,
            backend=backend,
            **options,
        )
        for tokens in chunks(problem.case.lengths[1], sizes)
    ]
    return tuple(torch.cat(parts, 2) for parts in zip(*steps, strict=True))


def check_decoding(problem: Problem, o: Tensor, lse: Tensor) -> None:
    """They are as close to float64 attention over the whole sequence as naive attention is."""
    double = problem.double()
    truth, yardstick = naive(double), naive(problem)
    sums = magnitudes(double, problem.case.dtype)
    for name, ours, exact, same in zip(("o", "lse"), (o, lse), truth, yardstick, strict=True):
        same = None if problem.case.dtype == torch.float64 else same
        assert ours.dtype == yardstick[name == "lse"].dtype
        assert_close_to_float64(ours, exact, same, name, sums[name])
