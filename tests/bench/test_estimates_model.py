"""The model of speed estimates: units, cycles, tiles and decoding."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("triton", reason="needs Triton")

from bench.estimates import banks, decoding, pipes, tiles, times
from bench.estimates.gpu import A100, GPUS, H100
from bench.estimates.simulate import BARRIER_CYCLES, cycles_of_a_pass, prepare, simulate
from bench.machine_code.sass import NO_SCOREBOARD, Instruction
from tests.bench.listing import instruction


def steps(gpu, *instructions: Instruction) -> list:
    return [prepare(one, gpu) for one in instructions]


# Units


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_peak_rates_are_those_of_the_data_sheets(gpu):
    stated = {"H100 SXM": 989.4, "A100 SXM, 40 GB": 312}[gpu.name]
    assert gpu.peak == pytest.approx(stated, rel=0.005)


@pytest.mark.parametrize(
    ("gpu", "opcode", "operands", "warps", "cycles"),
    [
        # Four warps issue it together: 64 x 128 x 16 products at 2048 per cycle.
        (H100, "HGMMA.64x128x16.F32.BF16", "R24, gdesc[UR12], R24", 4, 64),
        # The left operand is in shared memory: 2048 + 1024 bytes at 128 per cycle, not 16 cycles.
        (H100, "HGMMA.64x32x16.F32.BF16", "R24, gdesc[UR12], R24", 4, 24),
        (H100, "HGMMA.64x32x16.F32.BF16", "R24, R152, gdesc[UR8], R24", 4, 16),
        (A100, "HMMA.16816.F32.BF16", "R36, R116, R4, RZ", 1, 2),
        (A100, "MUFU.EX2", "R1, R1", 1, 2),  # 32 exponentials at 16 per cycle
        (H100, "FFMA", "R1, R2, R3, R4", 4, 1),  # 128 at 128 per cycle
        (A100, "FFMA", "R1, R2, R3, R4", 4, 2),  # and at 64
        (A100, "LDSM.16.M88.4", "R4, [R30]", 1, 4),  # 512 bytes at 128 per cycle
        (A100, "LDS.128", "R4, [R30]", 1, 4),
        (A100, "STS.U16", "[R30], R4", 1, 0.5),
    ],
)
def test_cycles_of_a_unit_follow_from_its_rate(gpu, opcode, operands, warps, cycles):
    found = pipes.pipe_cycles([instruction(opcode, operands)], warps, gpu)
    assert max(found[pipe] for pipe in pipes.PIPES if pipe != pipes.ISSUE) == cycles
    assert found[pipes.ISSUE] == warps / 4


def test_copies_occupy_shared_memory_and_l2():
    copy = instruction("LDGSTS.E.BYPASS.128", "[R1], [R2.64]")
    found = pipes.pipe_cycles([copy], 1, H100)
    assert found[pipes.SHARED] == 512 / 128
    assert found[pipes.L2] == 512 / H100.l2_bytes


def test_instructions_that_never_run_only_take_issue_slots():
    one = Instruction("LDS", "RZ, [RZ]", "@!PT", 1, NO_SCOREBOARD, NO_SCOREBOARD, 0)
    assert pipes.pipe_cycles([one], 4, H100) == {pipes.ISSUE: 1}


@pytest.mark.parametrize("row", [32, 64, 128])
def test_bank_conflicts_follow_from_addresses(row):
    plain = banks.Layout(vec=8, per_phase=1, max_phase=1, row=row)
    # A line of 128 bytes has every bank once, and 8 rows are read, 16 bytes each.
    addresses = 2 * row * np.arange(8)
    assert plain.conflicts() == np.bincount(addresses % 128 // 16).max()
    swizzled = banks.Layout(8, per_phase=max(1, 64 // row), max_phase=min(8, row // 8), row=row)
    assert swizzled.conflicts() == 1


def test_layouts_of_operands_are_found_in_ttgir():
    ttgir = """
    #shared = #ttg.swizzled_shared<{vec = 8, perPhase = 2, maxPhase = 4, order = [1, 0]}>
    #shared1 = #ttg.swizzled_shared<{vec = 1, perPhase = 1, maxPhase = 1, order = [0]}>
    %a = ttg.local_alloc : () -> !ttg.memdesc<3x64x32xbf16, #shared, #smem, mutable>
    %b = ttg.local_alloc : () -> !ttg.memdesc<32xf32, #shared1, #smem>
    """
    assert banks.layouts(ttgir) == {banks.Layout(8, 2, 4, 32)}


# Simulation


def test_warps_obey_their_control_fields():
    add = instruction("FADD", stall=5)
    assert simulate(steps(H100, add, add, add), warps=1) == 10
    load = instruction("LDS", sets=3)
    of_loaded = instruction("FADD", waits=1 << 3)
    assert simulate(steps(H100, load, of_loaded), warps=1) == 1 + H100.shared_latency
    assert simulate(steps(H100, load, instruction("FADD", waits=1 << 2)), warps=1) == 1


def test_schedulers_issue_one_instruction_per_cycle():
    body = steps(H100, *[instruction("UMOV", stall=4)] * 50)
    # Four warps are on four partitions, and 16 warps hide each other's stalls.
    assert cycles_of_a_pass(body, warps=4, blocks=1) == 200
    assert cycles_of_a_pass(body, warps=16, blocks=1) == pytest.approx(200, abs=2)
    assert cycles_of_a_pass(body, warps=32, blocks=1) == pytest.approx(400, abs=4)


@pytest.mark.parametrize("warps", [4, 8, 16])
def test_exponentials_are_limited_by_their_unit(warps):
    body = steps(H100, *[instruction("MUFU.EX2")] * 20)
    exponentials = 20 * 32 * warps
    assert cycles_of_a_pass(body, warps, blocks=1) == pytest.approx(exponentials / 16, abs=1)


def product(columns: int, end: bool = True) -> Instruction:
    operands = "R24, R152, gdesc[UR12], R24" + ", gsb0" * end
    return instruction(f"HGMMA.64x{columns}x16.F32.BF16", operands)


WAIT_FOR_ALL = instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x0")
WAIT_FOR_ALL_BUT_ONE = instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x1")


def test_products_of_warp_groups_overlap_until_their_wait():
    others = [instruction("FADD")] * 100
    apart = steps(H100, product(256), WAIT_FOR_ALL, *others)
    beside = steps(H100, product(256), *others, WAIT_FOR_ALL)
    assert simulate(apart, warps=4) - simulate(beside, warps=4) == pytest.approx(100, abs=2)
    two = (product(256), product(64))
    # The second one takes 32 more cycles, for which a wait that allows one pending does not stall.
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


def test_barriers_stall_only_their_block():
    barrier = instruction("BAR.SYNC.DEFER_BLOCKING", "0x0")
    body = steps(H100, *[instruction("MUFU.EX2")] * 10, barrier, instruction("FADD"))
    # Eight warps: two per partition, the second of which ends its exponentials 80 cycles later.
    assert simulate(body, warps=8) == pytest.approx(160 + BARRIER_CYCLES, abs=10)
    alone = simulate(body, warps=4)
    assert alone == pytest.approx(80 + BARRIER_CYCLES, abs=10)


def test_fences_stall_instructions_that_wait():
    fence = instruction("MEMBAR.ALL.CTA", sets_read=1)
    assert simulate(steps(H100, fence, instruction("FADD", waits=2)), warps=1) == H100.fence


# Tiles

# The loop over unmasked tiles, of causal and other problems.
UNMASKED = {tiles.FORWARD: (0, 0), tiles.DQ: (0, 0), tiles.DKV: (1, 0)}


def full_and_partial_tiles(kernel: str, n: int, block_m: int, block_n: int, causal: bool):
    """For each block, the numbers of tiles in which all pairs, and some pairs, are visible, by
    enumeration. Rows beyond the last query do not count as pairs, but keys beyond the last do."""
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
def test_loops_run_once_per_visible_tile(kernel, causal, seed):
    for _ in range(20):
        block_m, block_n = random.choice((16, 32, 64)), random.choice((16, 32, 64))
        n = random.randrange(1, 400)
        tiling = tiles.tiling("none", causal, n, block_m, block_n)
        at = UNMASKED[kernel][not causal]
        found = [(block[at], sum(block) - block[at]) for block in tiles.passes(kernel, tiling)]
        assert found == full_and_partial_tiles(kernel, n, block_m, block_n, causal), (n, tiling)


@pytest.mark.parametrize("kernel", [tiles.FORWARD, tiles.DQ, tiles.DKV])
def test_loops_with_factors_run_for_tiles_without_a_mask(kernel, seed):
    for _ in range(20):
        block_m, block_n = random.choice((32, 64)), 64
        n = 64 * random.randrange(1, 9)
        tiling = tiles.tiling("linear", True, n, block_m, block_n)
        at = UNMASKED[kernel][0]
        half = (block_m if kernel == tiles.DKV else block_n) // 2
        whole = full_and_partial_tiles(kernel, n, block_m, block_n, True)
        sizes = (half, block_n) if kernel == tiles.DKV else (block_m, half)
        halves = full_and_partial_tiles(kernel, n, *sizes, True)
        for block, (factored, _), (small, masked) in zip(
            tiles.passes(kernel, tiling), whole, halves, strict=True
        ):
            assert block[at] == factored
            # The remaining pairs are computed in tiles of half the size.
            assert sum(block) - block[at] == small + masked - 2 * factored


@pytest.mark.parametrize("kernel", [tiles.FORWARD, tiles.DKV])
def test_tables_are_factored_where_all_distances_are_far(kernel, seed):
    n, block_m, block_n = 64 * random.randrange(1, 12), random.choice((32, 64)), 64
    tiling = tiles.tiling("distance", True, n, block_m, block_n)
    at = UNMASKED[kernel][0] + (kernel == tiles.DKV)  # near tiles come before
    distances = np.arange(n)[:, None] - np.arange(n)[None, :]
    of_tiles = distances.reshape(n // block_m, block_m, n // block_n, block_n)
    are_far = of_tiles.min(axis=(1, 3)) >= tiles.FAR
    expected = are_far.sum(0) if kernel == tiles.DKV else are_far.sum(1)[::-1]
    assert [block[at] for block in tiles.passes(kernel, tiling)] == expected.tolist()


@pytest.mark.parametrize("kernel", [tiles.FORWARD, tiles.DQ, tiles.DKV])
@pytest.mark.parametrize("form", ["dense", "normalized", "relative", "relative_last"])
def test_tiles_of_equal_size_cover_all_visible_pairs_once(form, kernel, seed):
    for _ in range(20):
        block_m, block_n = random.choice((16, 32, 64)), random.choice((16, 32, 64))
        n, causal = random.randrange(1, 3000), random.random() < 0.5
        tiling = tiles.tiling(form, causal, n, block_m, block_n)
        found = [sum(block) for block in tiles.passes(kernel, tiling)]
        visible = full_and_partial_tiles(kernel, n, block_m, block_n, causal)
        assert found == [sum(counts) for counts in visible], (n, tiling)


@pytest.mark.parametrize("kernel", [tiles.FORWARD, tiles.DKV])
def test_a_band_has_no_bias_in_tiles_beyond_it(kernel, seed):
    n, block_m, block_n = 64 * random.randrange(12, 24), random.choice((32, 64)), 64
    tiling = tiles.tiling("relative", True, n, block_m, block_n)
    at = UNMASKED[kernel][0] + (kernel == tiles.DKV)  # tiles in the band come before
    distances = np.arange(n)[:, None] - np.arange(n)[None, :]
    of_tiles = distances.reshape(n // block_m, block_m, n // block_n, block_n)
    are_beyond = of_tiles.min(axis=(1, 3)) >= tiles.BAND
    expected = are_beyond.sum(0) if kernel == tiles.DKV else are_beyond.sum(1)[::-1]
    assert [block[at] for block in tiles.passes(kernel, tiling)] == expected.tolist()


# Decoding


def test_parts_of_a_cache_contain_each_tile_once(seed):
    for _ in range(50):
        count, parts = random.randrange(1, 1000), random.randrange(1, 64)
        found = [of_part for (of_part,) in decoding.passes(count, parts)]
        assert sum(found) == count
        assert len(found) == parts
        assert max(found) == -(-count // parts)


def test_keys_of_a_cache_are_shared_by_a_group_of_heads():
    problem = times.Problem(2, 8, 1000, 64)
    shared = 2 * 2 * 2 * 2 * 1000 * 64  # two heads of keys and values, in two bytes
    assert decoding.bytes_read("none", problem) == shared
    assert decoding.bytes_read("cumulative", problem) == shared + 8 * 2 * 8 * 1000
