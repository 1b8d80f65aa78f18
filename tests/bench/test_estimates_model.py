"""The model behind estimates of speed: how machine code is read, units, cycles and tiles."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs Triton")

from bench.estimates import banks, pipes, sass, tiles
from bench.estimates.gpu import A100, GPUS, H100
from bench.estimates.sass import NO_SCOREBOARD, Instruction
from bench.estimates.simulate import BARRIER_CYCLES, cycles_of_a_pass, prepare, simulate


def instruction(opcode: str, operands: str = "", **control) -> Instruction:
    defaults = {"stall": 1, "sets": NO_SCOREBOARD, "sets_read": NO_SCOREBOARD, "waits": 0}
    return Instruction(opcode, operands, None, **defaults | control)


def steps(gpu, *instructions: Instruction) -> list:
    return [prepare(one, gpu) for one in instructions]


# Machine code


def listing(instructions: list[Instruction], labels: dict[int, str], branches: dict[int, str]):
    """As nvdisasm prints it. The yield hint and reused operands beside the control are random."""
    lines = []
    for at, one in enumerate(instructions):
        if at in labels:
            lines.append(f"{labels[at]}:")
        target = f" `({branches[at]})" if at in branches else ""
        fields = one.stall | one.sets << 5 | one.sets_read << 8 | one.waits << 11
        word = (fields | random.getrandbits(1) << 4) << 41 | random.getrandbits(41)
        predicate = f"{one.predicate} " if one.predicate else ""
        text = f"        /*{16 * at:04x}*/    {predicate}{one.opcode} {one.operands}{target} ;"
        lines += [f"{text}  /* 0x{random.getrandbits(64):016x} */", f"      /* 0x{word:016x} */"]
    return "\n".join(lines)


def test_control_fields_and_loops_are_read_from_a_listing(seed):
    made = [
        Instruction(
            *("FADD", "R1, R2, R3", random.choice((None, "@P0", "@!PT"))),
            stall=random.randrange(16),
            sets=random.randrange(8),
            sets_read=random.randrange(8),
            waits=random.randrange(64),
        )
        for _ in range(12)
    ]
    for at in (6, 9, 11):
        made[at] = instruction("BRA", "")
    labels = {2: ".L_x_1", 4: ".L_x_2", 11: ".L_x_3"}
    branches = {6: ".L_x_2", 9: ".L_x_1", 11: ".L_x_3"}
    code = sass.parse(listing(made, labels, branches))
    bodies = [(loop.begin, loop.end) for loop in code.loops]
    assert bodies == [(2, 10), (4, 7)]  # and not the branch to itself at the end
    for one, read in zip(made, code.instructions, strict=True):
        assert one.opcode == read.opcode
        assert one.predicate == read.predicate
        assert (one.stall, one.sets, one.sets_read, one.waits) == (
            *(read.stall, read.sets, read.sets_read, read.waits),
        )


# Units


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_peak_rates_are_those_of_the_data_sheets(gpu):
    stated = {"H100 SXM": 989.4, "A100 SXM, 40 GB": 312}[gpu.name]
    assert gpu.peak == pytest.approx(stated, rel=0.005)


@pytest.mark.parametrize(
    ("gpu", "opcode", "operands", "warps", "cycles"),
    [
        # Four warps issue it together: 64 x 128 x 16 products at 2048 a cycle.
        (H100, "HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR12], R24", 4, 64),
        # The left operand from shared memory: 2048 + 1024 bytes at 128 a cycle, not 16 cycles.
        (H100, "HGMMA.64x32x16.F32.BF16", "R24, gdesc[UR12], R24", 4, 24),
        (H100, "HGMMA.64x32x16.F32.BF16", "R24, R152, gdesc[UR8], R24", 4, 16),
        (A100, "HMMA.16816.F32.BF16", "R36, R116, R4, RZ", 1, 2),
        (A100, "MUFU.EX2", "R1, R1", 1, 2),  # 32 exponentials at 16 a cycle
        (H100, "FFMA", "R1, R2, R3, R4", 4, 1),  # 128 at 128 a cycle
        (A100, "FFMA", "R1, R2, R3, R4", 4, 2),  # and at 64
        (A100, "LDSM.16.M88.4", "R4, [R30]", 1, 4),  # 512 bytes at 128 a cycle
        (A100, "LDS.128", "R4, [R30]", 1, 4),
        (A100, "STS.U16", "[R30], R4", 1, 0.5),
    ],
)
def test_cycles_of_a_unit_follow_from_its_rate(gpu, opcode, operands, warps, cycles):
    found = pipes.pipe_cycles([instruction(opcode, operands)], warps, gpu)
    assert max(found[pipe] for pipe in pipes.PIPES if pipe != pipes.ISSUE) == cycles
    assert found[pipes.ISSUE] == warps / 4


def test_copies_take_turns_in_shared_memory_and_on_the_way_to_the_cache():
    copy = instruction("LDGSTS.E.BYPASS.128", "[R1], [R2.64]")
    found = pipes.pipe_cycles([copy], 1, H100)
    assert found[pipes.SHARED] == 512 / 128
    assert found[pipes.L2] == 512 / H100.l2_bytes


def test_instructions_that_never_run_take_nothing_but_their_issue():
    one = Instruction("LDS", "RZ, [RZ]", "@!PT", 1, NO_SCOREBOARD, NO_SCOREBOARD, 0)
    assert pipes.pipe_cycles([one], 4, H100) == {pipes.ISSUE: 1}


@pytest.mark.parametrize("row", [32, 64, 128])
def test_bank_conflicts_are_those_of_the_addresses(row):
    plain = banks.Layout(vec=8, per_phase=1, max_phase=1, row=row)
    # Rows of 8 x 16 bytes lie in lines of 128 bytes, each of which has every bank once.
    addresses = 2 * row * np.arange(8)
    assert plain.conflicts() == np.bincount(addresses % 128 // 16).max()
    swizzled = banks.Layout(8, per_phase=max(1, 64 // row), max_phase=min(8, row // 8), row=row)
    assert swizzled.conflicts() == 1


def test_layouts_of_operands_are_found_in_what_triton_compiled():
    ttgir = """
    #shared = #ttg.swizzled_shared<{vec = 8, perPhase = 2, maxPhase = 4, order = [1, 0]}>
    #shared1 = #ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [0]}>
    %a = ttg.local_alloc : () -> !ttg.memdesc<3x64x32xbf16, #shared, #smem, mutable>
    %b = ttg.local_alloc : () -> !ttg.memdesc<32xf32, #shared1, #smem>
    """
    assert banks.layouts(ttgir) == {banks.Layout(8, 2, 4, 32)}


# Simulation


def test_a_warp_waits_as_its_control_fields_say():
    add = instruction("FADD", stall=5)
    assert simulate(steps(H100, add, add, add), warps=1) == 10
    load = instruction("LDS", sets=3)
    of_loaded = instruction("FADD", waits=1 << 3)
    assert simulate(steps(H100, load, of_loaded), warps=1) == 1 + H100.shared_latency
    assert simulate(steps(H100, load, instruction("FADD", waits=1 << 2)), warps=1) == 1


def test_a_scheduler_issues_one_instruction_in_a_cycle():
    body = steps(H100, *[instruction("UMOV", stall=4)] * 50)
    # Four warps go to four partitions, and 16 warps hide each other's stalls.
    assert cycles_of_a_pass(body, warps=4, blocks=1) == 200
    assert cycles_of_a_pass(body, warps=16, blocks=1) == pytest.approx(200, abs=2)
    assert cycles_of_a_pass(body, warps=32, blocks=1) == pytest.approx(400, abs=4)


@pytest.mark.parametrize("warps", [4, 8, 16])
def test_exponentials_take_turns(warps):
    body = steps(H100, *[instruction("MUFU.EX2")] * 20)
    exponentials = 20 * 32 * warps
    assert cycles_of_a_pass(body, warps, blocks=1) == pytest.approx(exponentials / 16, abs=1)


def product(columns: int, end: bool = True) -> Instruction:
    operands = "R24, R152, gdesc[UR12], R24" + ", gsb0" * end
    return instruction(f"HGMMA.64x{columns}x16.F32.BF16", operands)


WAIT_FOR_ALL = instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x0")
WAIT_FOR_ALL_BUT_ONE = instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x1")


def test_products_of_warp_groups_go_on_until_they_are_waited_for():
    others = [instruction("FADD")] * 100
    apart = steps(H100, product(256), WAIT_FOR_ALL, *others)
    beside = steps(H100, product(256), *others, WAIT_FOR_ALL)
    assert simulate(apart, warps=4) - simulate(beside, warps=4) == pytest.approx(100, abs=2)
    two = (product(256), product(64))
    # The second takes 32 cycles more, and is not waited for where one may go on.
    last = simulate(steps(H100, *two, WAIT_FOR_ALL), warps=4)
    assert last - simulate(steps(H100, *two, WAIT_FOR_ALL_BUT_ONE), warps=4) == 32


def test_products_of_all_warp_groups_share_the_matrix_units():
    body = steps(H100, *[product(256, end=False)] * 7, product(256), WAIT_FOR_ALL)
    each = 8 * 64 * 256 * 16 / 2048
    assert cycles_of_a_pass(body, warps=4, blocks=2) == pytest.approx(2 * each, rel=0.05)


def test_copies_are_waited_for_by_groups():
    copy = instruction("LDGSTS.E.BYPASS.128", "[R1], [R2.64]")
    end = instruction("LDGDEPBAR")
    groups = (copy, end, copy, end)
    cycles = {
        allowed: simulate(
            steps(A100, *groups, instruction("DEPBAR.LE", f"SB0, 0x{allowed}")), warps=1
        )
        for allowed in range(3)
    }
    assert cycles[0] - cycles[1] == pytest.approx(512 / A100.l2_bytes)
    assert cycles[1] == pytest.approx(512 / A100.l2_bytes + A100.l2_latency)
    assert cycles[2] == len(groups)


def test_a_barrier_holds_a_block_and_no_other_one():
    barrier = instruction("BAR.SYNC.DEFER_BLOCKING", "0x0")
    body = steps(H100, *[instruction("MUFU.EX2")] * 10, barrier, instruction("FADD"))
    # Eight warps: two a partition, the second of which ends its exponentials 80 cycles later.
    assert simulate(body, warps=8) == pytest.approx(160 + BARRIER_CYCLES, abs=10)
    alone = simulate(body, warps=4)
    assert alone == pytest.approx(80 + BARRIER_CYCLES, abs=10)


def test_a_fence_holds_who_waits_for_it():
    fence = instruction("MEMBAR.ALL.CTA", sets_read=1)
    assert simulate(steps(H100, fence, instruction("FADD", waits=2)), warps=1) == H100.fence


# Tiles

# Which loop goes through tiles without a mask, of causal problems and of others.
WHOLE = {tiles.FORWARD: (0, 0), tiles.DQ: (0, 0), tiles.DKV: (1, 0)}


def whole_and_other_tiles(kernel: str, n: int, block_m: int, block_n: int, causal: bool):
    """By enumerating pairs: of each block, tiles all of whose pairs see each other, and others with
    some that do. Rows of blocks that go beyond the last query do not count, those of keys do."""
    queries, keys = np.arange(n)[:, None], np.arange(-(-n // block_n) * block_n)[None, :]
    sees = np.broadcast_to((keys < n) & ((keys <= queries) | (not causal)), (n, keys.size))
    found = []
    if kernel == tiles.DKV:
        for j in range(0, n, block_n):
            parts = [sees[i : i + block_m, j : j + block_n] for i in range(0, n, block_m)]
            whole = [part.all() and len(part) == block_m for part in parts]
            found.append((sum(whole), sum(x.any() for x in parts) - sum(whole)))
    else:
        for i in range(0, n, block_m):
            parts = [sees[i : i + block_m, j : j + block_n] for j in range(0, n, block_n)]
            whole = [part.all() for part in parts]
            found.append((sum(whole), sum(x.any() for x in parts) - sum(whole)))
    return found if kernel == tiles.DKV else found[::-1]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kernel", [tiles.FORWARD, tiles.DQ, tiles.DKV])
def test_loops_run_once_for_each_tile_that_pairs_see(kernel, causal, seed):
    for _ in range(20):
        block_m, block_n = random.choice((16, 32, 64)), random.choice((16, 32, 64))
        n = random.randrange(1, 400)
        tiling = tiles.tiling("none", causal, n, block_m, block_n)
        at = WHOLE[kernel][not causal]
        found = [(block[at], sum(block) - block[at]) for block in tiles.passes(kernel, tiling)]
        assert found == whole_and_other_tiles(kernel, n, block_m, block_n, causal), (n, tiling)


@pytest.mark.parametrize("kernel", [tiles.FORWARD, tiles.DQ, tiles.DKV])
def test_loops_with_factors_run_for_tiles_without_a_mask(kernel, seed):
    for _ in range(20):
        block_m, block_n = random.choice((32, 64)), 64
        n = 64 * random.randrange(1, 9)
        tiling = tiles.tiling("linear", True, n, block_m, block_n)
        at = WHOLE[kernel][0]
        half = (block_m if kernel == tiles.DKV else block_n) // 2
        whole = whole_and_other_tiles(kernel, n, block_m, block_n, True)
        sizes = (half, block_n) if kernel == tiles.DKV else (block_m, half)
        halves = whole_and_other_tiles(kernel, n, *sizes, True)
        for block, (factored, _), (small, masked) in zip(
            tiles.passes(kernel, tiling), whole, halves, strict=True
        ):
            assert block[at] == factored
            # What the factored tiles leave is done in tiles of half the size.
            assert sum(block) - block[at] == small + masked - 2 * factored


@pytest.mark.parametrize("kernel", [tiles.FORWARD, tiles.DKV])
def test_tables_are_factored_where_all_distances_are_far(kernel, seed):
    n, block_m, block_n = 64 * random.randrange(1, 12), random.choice((32, 64)), 64
    tiling = tiles.tiling("distance", True, n, block_m, block_n)
    at = WHOLE[kernel][0] + (kernel == tiles.DKV)  # near tiles come before
    distances = np.arange(n)[:, None] - np.arange(n)[None, :]
    of_tiles = distances.reshape(n // block_m, block_m, n // block_n, block_n)
    are_far = of_tiles.min(axis=(1, 3)) >= tiles.FAR
    expected = are_far.sum(0) if kernel == tiles.DKV else are_far.sum(1)[::-1]
    assert [block[at] for block in tiles.passes(kernel, tiling)] == expected.tolist()
