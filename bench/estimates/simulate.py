"""Steps the warps of a multiprocessor through machine code, instruction by instruction.

A scheduler issues one instruction per cycle, from the warp that has been ready longest. A warp
waits for the cycles and scoreboards in the instruction's control fields, for barriers, and for the
unit that the instruction occupies. Warp-group products and asynchronous copies run concurrently
until the warp waits for them. Values are not computed: a warp executes all instructions regardless
of their predicates, except those that never run.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from bench.machine_code.sass import NO_SCOREBOARD, Instruction

from .gpu import PARTITIONS, Gpu
from .pipes import OF_ALL, Use, uses

BARRIER_CYCLES = 20  # from the arrival of the last warp to the release of all
READ_CYCLES = 12  # until an instruction has read its operands
# The cycles between the starts of blocks that share a multiprocessor, an arbitrary number.
STAGGER = 137
# Iterations until a loop is in a steady state, and those over which cycles are averaged.
WARM_UP, MEASURED = 3, 6


class Kind(Enum):
    OTHER = auto()
    BARRIER = auto()
    FENCE = auto()
    PRODUCT = auto()  # of a warp group; the last of a group of products ends it
    END_OF_PRODUCTS = auto()
    PRODUCT_OF_WARP = auto()  # of a single warp, where those of groups do not delay it
    WAIT_FOR_PRODUCTS = auto()
    COPY = auto()
    END_OF_COPIES = auto()
    WAIT_FOR_COPIES = auto()
    WAIT = auto()  # for an event, and the signal of one, between warps that do different things
    SIGNAL = auto()


@dataclass(frozen=True, slots=True)
class Step:
    """An instruction with the units that it uses."""

    stall: int
    sets: int
    sets_read: int
    waits: tuple[int, ...]
    uses: tuple[Use, ...]
    kind: Kind
    allowed: int  # the number of groups that may be pending after a wait
    event: str = ""  # of WAIT and SIGNAL


@dataclass(slots=True)
class Block:
    warps: int
    arrived: list[Warp] = field(default_factory=list)


@dataclass(slots=True)
class Warp:
    partition: int
    block: Block
    steps: Sequence[Step]
    at: int = 0
    scoreboards: list[float] = field(default_factory=lambda: [0.0] * 6)
    product_end: float = 0.0
    products: list[float] = field(default_factory=list)  # when each group ends
    copy_end: float = 0.0
    copies: list[float] = field(default_factory=list)


def prepare(one: Instruction, gpu: Gpu, conflicts: int = 1) -> Step:
    waits = tuple(x for x in range(6) if one.waits >> x & 1)
    kind = _kind(one)
    allowed = 0
    if kind in (Kind.WAIT_FOR_PRODUCTS, Kind.WAIT_FOR_COPIES):
        allowed = int(re.search(r"0x([0-9a-f]+)", one.operands)[1], 16)
    used = uses(one, gpu, conflicts)
    return Step(one.stall, one.sets, one.sets_read, waits, used, kind, allowed)


def _kind(one: Instruction) -> Kind:
    if one.never_runs:
        return Kind.OTHER
    if one.name == "HGMMA":
        return Kind.END_OF_PRODUCTS if "gsb0" in one.operands else Kind.PRODUCT
    if one.opcode.startswith("WARPGROUP.DEPBAR"):
        return Kind.WAIT_FOR_PRODUCTS
    if one.name == "DEPBAR" and one.operands.startswith("SB0"):
        return Kind.WAIT_FOR_COPIES
    names = {"LDGSTS": Kind.COPY, "LDGDEPBAR": Kind.END_OF_COPIES}
    return names.get(
        one.name, {"BAR": Kind.BARRIER, "MEMBAR": Kind.FENCE}.get(one.name, Kind.OTHER)
    )


def cycles_of_a_pass(steps: Sequence[Step], warps: int, blocks: int) -> float:
    """Cycles per iteration of a loop of these steps, in which every block completes one."""
    few, many = (simulate(steps * n, warps, blocks) for n in (WARM_UP, WARM_UP + MEASURED))
    return (many - few) / MEASURED


def simulate(steps: Sequence[Step], warps: int, blocks: int = 1) -> float:
    """Cycles until all blocks, of `warps` warps each, have executed the steps."""
    multiprocessor = Multiprocessor()
    for number in range(blocks):
        block = Block(warps)
        for warp in range(warps):
            multiprocessor.push(number * STAGGER, Warp(warp % PARTITIONS, block, steps))
    return multiprocessor.run()


class Multiprocessor:
    def __init__(self) -> None:
        self.next_issue = [0.0] * PARTITIONS
        # The cycle in which each unit is free: units of a partition, and shared ones.
        self.units: list[dict[str, float]] = [{} for _ in range(PARTITIONS)]
        self.of_all: dict[str, float] = {}
        self.end = 0.0
        self.pushed = 0
        self.ready: list[tuple[float, int, Warp]] = []

    def run(self) -> float:
        while self.ready:
            time, _, warp = heapq.heappop(self.ready)
            possible = self._possible(warp, time)
            if possible > time:
                self.push(possible, warp)
            else:
                self._issue(warp, time)
        return self.end

    def push(self, time: float, warp: Warp) -> None:
        self.pushed += 1
        heapq.heappush(self.ready, (time, self.pushed, warp))

    def _possible(self, warp: Warp, time: float) -> float:
        """The earliest cycle in which the warp can issue its next instruction."""
        step = warp.steps[warp.at]
        time = max(time, self.next_issue[warp.partition])
        for scoreboard in step.waits:
            time = max(time, warp.scoreboards[scoreboard])
        kind = step.kind
        if kind is Kind.WAIT_FOR_PRODUCTS or kind is Kind.WAIT_FOR_COPIES:
            groups = warp.products if kind is Kind.WAIT_FOR_PRODUCTS else warp.copies
            if len(groups) > step.allowed:
                time = max(time, groups[-1 - step.allowed])
        elif kind not in (Kind.PRODUCT, Kind.END_OF_PRODUCTS, Kind.PRODUCT_OF_WARP):
            # Requests to shared units are queued, and the warp continues.
            units = self.units[warp.partition]
            for use in step.uses:
                if use.pipe not in OF_ALL:
                    time = max(time, units.get(use.pipe, 0.0))
        return time

    def _issue(self, warp: Warp, time: float) -> None:
        step = warp.steps[warp.at]
        self.next_issue[warp.partition] = time + 1
        end = self._use(step, warp, time)
        read = end if step.kind is Kind.FENCE else time + READ_CYCLES
        for scoreboard, free in ((step.sets, end), (step.sets_read, read)):
            if scoreboard != NO_SCOREBOARD:
                warp.scoreboards[scoreboard] = max(warp.scoreboards[scoreboard], free)
        self._run_concurrently(warp, step.kind, end)
        self.end = max(self.end, time)
        warp.at += 1
        if step.kind is Kind.BARRIER:
            self._arrive(warp, time + step.stall)
        elif warp.at < len(warp.steps):
            self.push(time + max(1, step.stall), warp)

    def _use(self, step: Step, warp: Warp, time: float) -> float:
        """Occupies each unit in turn and returns the cycle of the last result."""
        end = time
        for use in step.uses:
            units = self.of_all if use.pipe in OF_ALL else self.units[warp.partition]
            turn = max(time, units.get(use.pipe, 0.0))
            units[use.pipe] = turn + use.cycles
            end = max(end, turn + use.cycles + use.latency)
        return end

    def _run_concurrently(self, warp: Warp, kind: Kind, end: float) -> None:
        if kind is Kind.PRODUCT or kind is Kind.END_OF_PRODUCTS:
            warp.product_end = max(warp.product_end, end)
        if kind is Kind.END_OF_PRODUCTS:
            warp.products.append(warp.product_end)
        elif kind is Kind.COPY:
            warp.copy_end = max(warp.copy_end, end)
        elif kind is Kind.END_OF_COPIES:
            warp.copies.append(warp.copy_end)

    def _arrive(self, warp: Warp, time: float) -> None:
        arrived = warp.block.arrived
        arrived.append(warp)
        if len(arrived) == warp.block.warps:
            for one in arrived:
                if one.at < len(one.steps):
                    self.push(time + BARRIER_CYCLES, one)
            arrived.clear()
