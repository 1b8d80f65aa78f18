"""The diagonals of square tiles over which gradients of tables are summed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ... import problem as calls
from ..operands import Plan, Problem, problem_of
from . import plans

# The maximum number of sums over diagonals that packed sequences use at a time.
_SUMS = 2**24


@dataclass(frozen=True)
class Diagonals:
    """The diagonals whose tiles contain given distances, for some batch entries.

    problem: that of the kernel. entries: which batch entries. count: the number of diagonals.
    first: the first one, an int or, with sequences, (B,) int32. place: the places of the distances
    in the sums, (distances,) or, with sequences, (B, 1, distances).
    """

    problem: Problem
    entries: slice
    count: int
    first: int | Tensor
    place: Tensor

    @property
    def grid(self) -> tuple[int, int]:
        return self.batch * self.problem.heads, self.count

    @property
    def batch(self) -> int:
        return self.entries.stop - self.entries.start

    def per_distance(self, sums: Tensor) -> Tensor:
        """Returns the sums of each distance, (B, H, distances, channels), from those that the
        tiles of the diagonals have for r - c = x + 1 - block, (B, H, diagonals, 2 block,
        channels)."""
        block = sums.shape[3] // 2
        per_place = (sums[:, :, :-1, block:] + sums[:, :, 1:, :block]).flatten(2, 3)
        place = self.place.expand(*sums.shape[:2], -1).unsqueeze(-1)
        return per_place.gather(2, place.expand(-1, -1, -1, sums.shape[4]))


def diagonals(
    problem: calls.Problem,
    plan: Plan | None,
    block: int,
    first_distance: int,
    count: int,
    sums: int,
) -> list[Diagonals]:
    """Returns the diagonals with the distances first_distance, first_distance + 1, ..., in parts
    whose size is bounded if sequences are packed.

    sums: the numbers per diagonal of each head.
    """
    geometry, sequences, device = problem.geometry, problem.sequences, problem.q.device
    # The difference of row and column, relative to diagonal 0, that precedes the first distance.
    begin = first_distance - 1
    if sequences is None:
        begin -= geometry.n_key - geometry.n_query
        number = (begin + count - 1) // block - begin // block + 2
    else:
        _, n_query, _, n_key, shift = sequences.rows.unbind(1)
        begin = (begin + n_query - n_key - shift)[:, None, None]
        number = (count + block - 2) // block + 2
    first = begin // block
    place = torch.arange(count, device=device) + (begin - first * block)
    whole = slice(0, problem.batch)
    every = Diagonals(problem_of(problem, plan), whole, number, first, place)
    if sequences is None:
        return [every]
    parts = [whole]
    if sequences.is_packed:
        step = max(1, _SUMS // (problem.q.shape[1] * number * sums))
        starts = range(0, problem.batch, step)
        parts = [slice(b, min(b + step, problem.batch)) for b in starts] or parts
    return [_of_entries(every, sequences.rows, part) for part in parts]


def _of_entries(every: Diagonals, rows: Tensor, part: slice) -> Diagonals:
    plan = plans.for_entries(every.problem.plan, part)
    own = every.problem._replace(sequences=rows[part], plan=plan)
    first, place = every.first[part].int(), every.place[part]
    return replace(every, problem=own, entries=part, first=first, place=place)
