"""Steps the warps of a block of the CUDA kernels through their machine code.

Two or three warp groups compute, each in four warps, and one more copies. Those that compute are
simulated instruction by instruction, like warps of the Triton kernels, and so are warps of the
other group that sum gradients of the bias. They wait for

- tiles, in a ring of stages: the producer copies them in order, each as soon as all warps have
  released the tile before it in its stage. A copy occupies the L2 cache, and its rows arrive some
  cycles later. Another warp of the producer fetches the numbers that a bias needs.
- their own rows, likewise, in a ring of one stage. Each group waits for its part of them in the
  kernels, but for all of them here.
- the turn of a group to issue products, if the groups take turns.
- what other warps have written, or finished reading, and what another warp has copied from shared
  memory since. All warps whose code signals an event take part in it.

Asynchronous products of all groups share the matrix units, in the order of their issue, and read
operands from shared memory. Other accesses and copies take the bandwidth that a product leaves, and
at least half of it if they need it, which then delays the product. Products of single warps come
between those of groups, and delay what is issued after them. How the hardware orders these has not
been published.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from bench.machine_code.sass import Instruction

from ..gpu import PARTITIONS, Gpu
from ..pipes import L2, MATRIX, SHARED, SHARED_BYTES, WARPS_OF_A_GROUP, Use, operand_bytes
from ..simulate import BARRIER_CYCLES, Block, Kind, Multiprocessor, Step, Warp, prepare

# Cycles from a copy's turn in the L2 cache to the end of a wait for its rows. No measurement of
# copies of this size is published. An estimate is the mean over these numbers, which also averages
# over ways in which groups can fall into step.
COPY_LATENCIES = (400, 600, 800)
SPAN = 10000  # cycles after which a copy is certainly in the past
ISSUE_CYCLES = 60  # of the producer, between two tiles
FIRST_SUMMER = 2  # the warp of the producer's group that sums, before others that do
OWN, TURN = "own rows", "turn"  # events besides the rings of tiles


@dataclass(frozen=True)
class Copy:
    """The copy of a tile to a stage of a ring.

    rounds: of loads, one after another, that fetch the numbers of the tile.
    """

    ring: str
    bytes: int
    stages: int
    rounds: int = 0


@dataclass(frozen=True)
class Handover:
    """What warps signal together is a tile of a ring.

    ahead: tiles that the ring has at the start. bytes: those that a warp copies from shared memory
    before the tile has arrived.
    """

    signal: str
    ring: str
    ahead: int = 0
    bytes: int = 0


def steps(
    path: Sequence[Instruction], waits: Sequence[str], releases: Sequence[str], gpu: Gpu
) -> list[Step]:
    """The steps of a path. waits, releases: the events, in the order of the code."""
    left, released, found = list(waits), list(releases), []
    for one in path:
        step = prepare(one, gpu)
        if one.name == "BAR":
            # The others are the barrier of all threads, which starts a block, and conditional ones:
            # the last group gives the first turn away, and the first group accepts the last one.
            is_turn = one.predicate is None and "0x100" in one.operands
            event = TURN if is_turn else ""
            kind = Kind.WAIT if one.opcode.startswith("BAR.SYNC") else Kind.SIGNAL
            step = replace(step, kind=kind if is_turn else Kind.OTHER, event=event)
        elif one.opcode.startswith("SYNCS.PHASECHK"):
            check = (Use(SHARED, 1, gpu.shared_latency),)
            step = replace(step, kind=Kind.WAIT, event=left.pop(0), uses=check)
        elif one.opcode.startswith("SYNCS.ARRIVE"):
            step = replace(step, kind=Kind.SIGNAL, event=released.pop(0), uses=(Use(SHARED, 1),))
        elif one.name == "HMMA":
            step = replace(step, kind=Kind.PRODUCT_OF_WARP)
        elif one.name == "HGMMA":
            # The bytes that it reads from shared memory, in cycles, and its multiply-adds.
            (product,) = step.uses
            step = replace(step, uses=(product, Use(SHARED, operand_bytes(one) / SHARED_BYTES)))
        found.append(step)
    if left or released:
        raise ValueError(f"a path without waits for {left}, or releases of {released}")
    return found


def _signals(program: Sequence[Step]) -> set[str]:
    return {step.event for step in program if step.kind is Kind.SIGNAL}


@dataclass
class Ring:
    full: list[float] = field(default_factory=list)  # when each tile has arrived
    empty: dict[int, float] = field(default_factory=dict)  # when all warps have released it
    releases: Counter[int] = field(default_factory=Counter)
    waiting: list[tuple[int, Consumer]] = field(default_factory=list)  # for which tile


@dataclass(slots=True)
class Consumer(Warp):
    """A warp that computes or sums. waits, releases: how many tiles of each ring it has waited for,
    and released."""

    group: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    releases: Counter[str] = field(default_factory=Counter)


@dataclass
class Turn:
    """The barrier at which a group waits for its turn, and the group before it passes it."""

    arrived: int = 0
    waiting: list[Consumer] = field(default_factory=list)


class OneBlock(Multiprocessor):
    """A multiprocessor with one block."""

    def __init__(
        self,
        of_warps: Sequence[Step],
        groups: int,
        copies: Iterable[Copy],
        gpu: Gpu,
        latency: int,
        handovers: Iterable[Handover] = (),
        summers: Sequence[Sequence[Step]] = (),
    ):
        """groups: that compute. copies: those of the producer, in order. latency: of each, in
        cycles. summers: the steps of each warp that sums."""
        super().__init__()
        self.gpu, self.latency = gpu, latency
        n_warps = groups * WARPS_OF_A_GROUP
        # The warps that signal each event.
        self.signallers = Counter(n_warps * [*_signals(of_warps)])
        for program in summers:
            self.signallers.update(_signals(program))
        self.copies = deque(copies)
        self.rings = {copy.ring: Ring() for copy in self.copies}
        self.handovers = {one.signal: one for one in handovers}
        for one in self.handovers.values():
            self.rings[one.ring] = Ring(full=[0.0] * one.ahead)
        self.signals: dict[str, Counter[int]] = {one: Counter() for one in self.handovers}
        self.copying, self.fetching = 0.0, 0.0  # until when the warps of the producer are busy
        # Cycles of shared memory that other accesses have taken from products, which pay later.
        self.owed = [0.0] * PARTITIONS
        self.written: deque[tuple[float, float]] = deque()  # when copies write to shared memory
        self.turns = [Turn(arrived=WARPS_OF_A_GROUP), *(Turn() for _ in range(1, groups))]
        self._produce()
        block = Block(n_warps)
        for n in range(n_warps):
            group = n // WARPS_OF_A_GROUP
            self.push(0.0, Consumer(n % PARTITIONS, block, of_warps, group=group))
        for n, program in enumerate(summers, FIRST_SUMMER):
            self.push(0.0, Consumer(n % PARTITIONS, block, program))

    def run(self) -> float:
        end = super().run()
        waiting = [turn.waiting for turn in self.turns] + [x.waiting for x in self.rings.values()]
        if self.copies or any(waiting):
            raise RuntimeError("warps wait for events that nothing signals")
        return end

    def _issue(self, warp: Consumer, time: float) -> None:
        step = warp.steps[warp.at]
        if step.kind is Kind.WAIT:
            if step.event == TURN:
                self.next_issue[warp.partition] = time + 1
                warp.at += 1
                self._arrive_at_turn(warp.group, time, warp)
                return
            ring, tile = self.rings[step.event], warp.waits[step.event]
            if tile >= len(ring.full):
                ring.waiting.append((tile, warp))
                return
            if ring.full[tile] > time:
                self.push(ring.full[tile], warp)
                return
            warp.waits[step.event] += 1
        super()._issue(warp, time)
        if step.kind is Kind.SIGNAL:
            if step.event == TURN:
                self._arrive_at_turn((warp.group + 1) % len(self.turns), time)
            elif step.event in self.handovers:
                self._hand_over(warp, self.handovers[step.event], time)
            else:
                self._release(warp, step.event, time)

    def _hand_over(self, warp: Consumer, what: Handover, time: float) -> None:
        tile = warp.releases[what.signal]
        warp.releases[what.signal] += 1
        self.signals[what.signal][tile] += 1
        if self.signals[what.signal][tile] == self.signallers[what.signal]:
            time += self.gpu.shared_latency
            self._fill(what.ring, self._copied(time, what.bytes) if what.bytes else time)

    def _arrive_at_turn(self, group: int, time: float, waits: Consumer | None = None) -> None:
        turn = self.turns[group]
        turn.arrived += 1
        if waits is not None:
            turn.waiting.append(waits)
        if turn.arrived == 2 * WARPS_OF_A_GROUP:
            for warp in turn.waiting:
                self.push(time + BARRIER_CYCLES, warp)
            self.turns[group] = Turn()

    def _release(self, warp: Consumer, name: str, time: float) -> None:
        ring, tile = self.rings[name], warp.releases[name]
        warp.releases[name] += 1
        ring.releases[tile] += 1
        if ring.releases[tile] == self.signallers[name]:
            ring.empty[tile] = time + self.gpu.shared_latency
            self._produce()

    def _produce(self) -> None:
        """Copies the tiles for which there are empty stages."""
        while self.copies:
            copy = self.copies[0]
            ring = self.rings[copy.ring]
            before = len(ring.full) - copy.stages
            if before >= 0 and before not in ring.empty:
                return
            start = ring.empty.get(before, 0.0)
            self.copying = max(self.copying, start) + ISSUE_CYCLES
            full = self._copied(self.copying, copy.bytes)
            if copy.rounds:
                round_of_loads = self.gpu.l2_latency + self.gpu.shared_latency
                self.fetching = max(self.fetching, start) + copy.rounds * round_of_loads
                full = max(full, self.fetching)
            self.copies.popleft()
            self._fill(copy.ring, full)

    def _copied(self, time: float, size: int) -> float:
        turn = max(time, self.of_all.get(L2, 0.0))
        self.of_all[L2] = turn + size / self.gpu.l2_bytes
        begin, end = turn + self.latency, self.of_all[L2] + self.latency
        self.written.append((begin, end))
        for n, units in enumerate(self.units):  # products that have been issued before
            beside = max(0.0, min(end, units.get(MATRIX, 0.0)) - begin)
            self.owed[n] += beside * self.gpu.l2_bytes / SHARED_BYTES
        return end

    def _fill(self, name: str, time: float) -> None:
        ring = self.rings[name]
        tile = len(ring.full)
        ring.full.append(time)
        for warp in [warp for waited, warp in ring.waiting if waited == tile]:
            self.push(time, warp)
        ring.waiting = [(waited, warp) for waited, warp in ring.waiting if waited != tile]

    def _use(self, step: Step, warp: Warp, time: float) -> float:
        if step.kind in (Kind.PRODUCT, Kind.END_OF_PRODUCTS):
            return self._multiply(step, warp.partition, time)
        if step.kind is Kind.PRODUCT_OF_WARP:
            (product,) = step.uses
            units = self.units[warp.partition]
            units[MATRIX] = max(time, units.get(MATRIX, 0.0)) + product.cycles
            return time + product.cycles
        self._owe(sum(use.cycles for use in step.uses if use.pipe == SHARED))
        return super()._use(step, warp, time)

    def _owe(self, cycles: float) -> None:
        for n in range(PARTITIONS):
            self.owed[n] += cycles

    def _written(self, begin: float, end: float) -> float:
        """The cycles of shared memory that copies take between two times."""
        while self.written and self.written[0][1] < begin - SPAN:
            self.written.popleft()
        shared = sum(max(0.0, min(end, b) - max(begin, a)) for a, b in self.written)
        return shared * self.gpu.l2_bytes / SHARED_BYTES

    def _multiply(self, step: Step, partition: int, time: float) -> float:
        product, operands = step.uses
        units = self.units[partition]
        free = units.get(MATRIX, 0.0)
        start = max(time, free)
        owed = max(0.0, self.owed[partition] + self._written(free, start) - (start - free))
        paid = min(owed, max(product.cycles - operands.cycles, operands.cycles))
        self.owed[partition] = owed - paid
        units[MATRIX] = start + max(product.cycles, operands.cycles + paid)
        self.owed[partition] += self._written(start, units[MATRIX])
        return units[MATRIX] + product.latency
