"""The exact results of a problem, by attention in plain PyTorch over blocks of queries.

Nothing of size N x N is stored: under a causal mask the queries of a block are the last ones of the
sequence that ends with it, and without a mask they see every key.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...backends.reference import attention
from ...exactness import Sums, summed
from ...geometry import Geometry
from .checked_form import KEYS, QUERIES, TOKENS
from .problems import DECODING_STEPS, Problem


def results(problem: Problem) -> Sums:
    """The results in the problem's dtype, as sums over blocks of queries."""
    return summed(contributions(problem))


def contributions(problem: Problem) -> Iterator[dict[str, Tensor]]:
    """The contribution of each block of queries to every result."""
    for entry, rows in problem.sequences:
        decoding = problem.call.name == "decoding"
        start = len(rows) - sum(DECODING_STEPS) if decoding else 0
        for first in range(start, len(rows), problem.form.block):
            block = slice(first, min(first + problem.form.block, len(rows)))
            with torch.set_grad_enabled(not decoding):
                found = attend(problem, entry, rows, block)
            place = entry, slice(None), rows[block]
            grads = problem.grad_o, problem.grad_lse
            whole = [torch.zeros_like(grad) for grad in grads]
            for x, own in zip(whole, found, strict=True):
                x[place] = own[0].detach()
            part = dict(zip(("o", "lse"), whole, strict=True))
            if not decoding:
                own = [grad[place][None] for grad in grads]
                gradients = torch.autograd.grad(found, [*problem.leaves.values()], own)
                names = (f"gradient of {name}" for name in problem.leaves)
                part.update(zip(names, gradients, strict=True))
            yield part


def attend(problem: Problem, entry: int, rows: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """o (1, H, block, D) and lse of a block of the queries of one sequence."""
    q, k, v = (x[entry : entry + 1, :, rows] for x in problem.inputs)
    n_key = block.stop if problem.call.causal else len(rows)
    n_query = block.stop - block.start
    # The last query of the block is aligned with key block.stop - 1.
    geometry = Geometry(n_query, n_key, problem.call.causal, shift=block.stop - n_key)
    bias = dense_bias(problem, entry, rows, block, n_key)
    scale = q.shape[3] ** -0.5
    return attention(q[:, :, block], k[:, :, :n_key], v[:, :, :n_key], bias, geometry, scale)


def dense_bias(
    problem: Problem, entry: int, rows: Tensor, block: slice, n_key: int
) -> Tensor | None:
    """The bias of a block of queries and all keys, (1, H, block, n_key), by its definition."""
    keys, position = rows[:n_key], torch.arange(len(rows), device=rows.device)
    own = {QUERIES: rows[block], KEYS: keys, TOKENS: keys}
    tensors = problem.form.selected(problem.tensors, entry, **own)
    return problem.form.pairs(tensors, position[block], position[:n_key])
