"""The instructions that the warps of a CUDA kernel execute, from its machine code.

The code of a kernel contains the programs of all warp groups, masks that most tiles skip, and
retries of waits. A warp of a group that computes executes the shortest path to its loop over tiles,
the shortest path through the loop for a whole tile, and the longest one for a masked tile. If it
computes one block of rows after another, the paths around the loop over tiles are those within the
loop over blocks.

These paths need not be possible ones outside the loop over whole tiles. The one to the loop loads
the order of a plan and the rows of a sequence, which a problem may lack, but not the prefix sums of
the block's own queries. The one of a masked tile compares positions as for keys on both sides.

A warp that sums gradients of the bias executes the shortest path through its own loop over tiles,
with as many iterations of the loops in it as the numbers that it sums need. This path leaves out
what a warp only does for sums that are too large to round, and what it does for some lanes alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.machine_code.sass import Code, Instruction, Loop

Path = tuple[Instruction, ...]
WAIT = "SYNCS.PHASECHK"


@dataclass(frozen=True)
class Paths:
    before: Path  # up to the loop over tiles
    whole: Path  # for a tile in which all pairs are visible
    last: Path  # for the last one of these
    masked: Path  # for a tile in which some are not
    after: Path


def of_consumers(
    code: Code, waits_before: int, waits: int, waits_of_last: int, is_persistent: bool
) -> Paths:
    """The paths of a warp that computes. waits: for tiles, before the loop, in it, and in its last
    iteration. is_persistent: whether there is a loop over blocks."""
    graph = _Graph(code)
    begin, last = loop_over_tiles(code)
    first, ends = 0, graph.exits
    if is_persistent:
        first, end = _loop_over_blocks(code, begin, max(graph.exits))
        ends = (end,)
    return Paths(
        before=graph.shortest(first, begin, waits_before)[:-1],
        whole=graph.shortest(begin, last, waits),
        last=graph.shortest(begin, last, waits_of_last),
        masked=graph.longest(begin, (last,)),
        # Stores are behind checks of the number of rows, which the shortest path would not pass.
        after=graph.longest(last + 1, ends),
    )


def of_summer(code: Code, waits: int, counts: Mapping[str, int], outer: Sequence[int] = ()) -> Path:
    """The path of a warp that sums dS, for a tile. waits: in its loop. counts: of instructions in a
    tile; the first ones find the numbers to sum. outer: iterations of the loops over these, except
    for an innermost one, which the compiler may have unrolled."""
    name, count = next(iter(counts.items()))
    loop = _loop_of_summer(code, waits, name)
    nested = [
        inner
        for inner in code.loops
        if loop.begin < inner.begin and inner.end < loop.end
        if any(one.name == name for one in code.body(inner))
    ]
    graph, trips = _Graph(code), [*outer, 1][: len(nested)]
    if len(nested) > len(outer):
        once = _repeated(graph, loop, waits, nested, trips)
        trips[-1] = count // sum(one.name == name for one in once)
    path = _repeated(graph, loop, waits, nested, trips)
    found = Counter(one.name for one in path)
    if any(found[name] != count for name, count in counts.items()):
        raise ValueError(f"{dict(counts)} for a tile, but found {dict(found)}")
    return path


def _loop_of_summer(code: Code, waits: int, name: str) -> Loop:
    found = []
    for loop in code.loops:
        body = code.body(loop)
        names = {one.name for one in body}
        is_theirs = body[-1].predicate and name in names and "HGMMA" not in names
        if is_theirs and sum(one.opcode.startswith(WAIT) for one in body) == waits:
            found.append(loop)
    return min(found, key=lambda loop: loop.end - loop.begin)


def _repeated(
    graph: _Graph, loop: Loop, waits: int, nested: Sequence[Loop], trips: Sequence[int]
) -> Path:
    """The shortest path through a loop, in which nested loops, one in another, are repeated. No
    wait is in these."""
    last = loop.end - 1
    if not nested:
        return graph.shortest(loop.begin, last, waits)
    (inner, *others), (repeats, *others_repeats) = nested, trips
    code_before = graph.code.instructions[loop.begin : inner.begin]
    earlier = sum(one.opcode.startswith(WAIT) for one in code_before)
    before = graph.shortest(loop.begin, inner.begin, earlier)[:-1]
    body = _repeated(graph, inner, 0, others, others_repeats)
    return before + repeats * body + graph.shortest(inner.end, last, waits - earlier)


def loop_over_tiles(code: Code) -> tuple[int, int]:
    """The first instruction of the loop, and the last one, which branches to the first."""
    # Retries of waits, which are at the end of the code, branch back unconditionally.
    conditional = (loop for loop in code.loops if code.instructions[loop.end - 1].predicate)
    loops = (
        loop for loop in conditional if {"HGMMA", "MUFU"} <= {one.name for one in code.body(loop)}
    )
    loop = min(loops, key=lambda loop: loop.end - loop.begin)
    return loop.begin, loop.end - 1


def _loop_over_blocks(code: Code, begin: int, last_exit: int) -> tuple[int, int]:
    """The first and last instruction of the loop around the loop over tiles, which begins there."""
    # Retries of waits, which come after all exits, branch back too.
    around = (loop for loop in code.loops if loop.begin < begin < loop.end <= last_exit)
    loop = min(around, key=lambda loop: loop.end - loop.begin)
    return loop.begin, loop.end - 1


class _Graph:
    def __init__(self, code: Code):
        self.code = code
        self.exits = tuple(
            at
            for at, one in enumerate(code.instructions)
            if one.name == "EXIT" and one.predicate is None
        )
        targets = dict(code.branches)
        self.following = [self._following(at, targets.get(at)) for at in range(len(self))]

    def __len__(self) -> int:
        return len(self.code.instructions)

    def _following(self, at: int, target: int | None) -> list[int]:
        one, found = self.code.instructions[at], []
        # The lanes of a warp agree, so a branch for lanes that differ is not taken.
        if target is not None and not one.opcode.startswith("BRA.DIV"):
            found.append(target)
        always_leaves = one.name in ("EXIT", "RET") or (
            one.name == "BRA" and one.operands.startswith("`")
        )
        if (one.predicate is not None or not always_leaves) and at + 1 < len(self):
            found.append(at + 1)
        return found

    def shortest(self, first: int, last: int, waits: int) -> Path:
        """Of the paths that only go forward in the code, with this number of waits."""
        start = first, 0
        previous, pending = {start: start}, deque([start])
        while (last, waits) not in previous:
            here = pending.popleft()
            at, waited = here
            waited += self.code.instructions[at].opcode.startswith(WAIT)
            for following in self.following[at]:
                there = following, waited
                if following > at and waited <= waits and there not in previous:
                    previous[there] = here
                    pending.append(there)
        found = [(last, waits)]
        while found[-1] != start:
            found.append(previous[found[-1]])
        return tuple(self.code.instructions[at] for at, _ in reversed(found))

    def longest(self, first: int, ends: tuple[int, ...]) -> Path:
        """Of the paths to any of the ends that only go forward."""
        lengths, previous = {first: 0}, {first: first}
        for at in range(first, max(ends)):
            if at not in lengths or at in ends:
                continue
            for following in self.following[at]:
                if following > at and lengths[at] >= lengths.get(following, 0):
                    lengths[following], previous[following] = lengths[at] + 1, at
        found = [max((end for end in ends if end in lengths), key=lambda end: lengths[end])]
        while found[-1] != first:
            found.append(previous[found[-1]])
        return tuple(self.code.instructions[at] for at in reversed(found))
