"""The model of speed estimates of the CUDA kernels, and the committed tables."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton's tools")

from bench import ROOT
from bench.estimates.calibration import FRACTION
from bench.estimates.cuda import published, run, simulate, skipping, times, turns
from bench.estimates.cuda.kernels import ALL, DKV, DQ, FORWARD, OF_KEYS, backward, build
from bench.estimates.cuda.paths import Paths, of_consumers, of_summer
from bench.estimates.cuda.simulate import Copy, Handover, OneBlock, steps
from bench.estimates.cuda.turns import Blocks, Costs
from bench.estimates.gpu import H100
from bench.estimates.times import Problem
from bench.machine_code.sass import Code, Instruction, Loop
from biased_flash_attn.cuda_kernels import nvrtc
from biased_flash_attn.cuda_kernels.launch import Launcher
from tests.bench.listing import instruction
from tests.emulator import cuda_driver
from tests.emulator.cuda_backend import emulated
from tests.kernels.cuda.backend import EMULATED, check
from tests.support.cases import Case
from tests.support.problems import drawn

NEEDS_NVRTC = pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())

# Instructions of the code that a warp executes

WAIT = instruction("SYNCS.PHASECHK.TRANS64.TRYWAIT", "P0, [UR4], R2")
RELEASE = instruction("SYNCS.ARRIVE.TRANS64.A1T0", "RZ, [UR4]", "@!P6")
PRODUCT = instruction("HGMMA.64x128x16.F32.BF16", "R24, R152, gdesc[UR4], R24, gsb0")
FINISH = instruction("WARPGROUP.DEPBAR.LE", "gsb0, 0x0")
EXP = instruction("MUFU.EX2", "R1, R1")
ADD = instruction("FADD", "R1, R2, R3", stall=4)
TERM = instruction("HMMA.16816.F32.BF16", "R8, R12, R4, R8")
OTHER_TERM = instruction("LDS", "R4, [R5]")
EXIT = instruction("EXIT")


def branch(predicate: str | None = None) -> Instruction:
    return instruction("BRA", "`(.L_x_1)", predicate)


def test_paths_skip_masks_and_retries():
    mask = [instruction("FSEL", f"R{n}") for n in range(3)]
    code = [
        *(ADD, WAIT, branch("@!P0")),  # 0: before the loop; the wait is retried at 16
        *(WAIT, branch("@!P0"), PRODUCT, FINISH, EXP),  # 3: the loop; its wait is retried at 18
        *(branch("@P1"), *mask, RELEASE, branch("@P2")),  # 8: whole tiles skip the mask
        *(ADD, EXIT),  # 14
        *(WAIT, branch(), WAIT, branch()),  # 16: retries
    ]
    branches = {2: 16, 4: 18, 8: 12, 13: 3, 17: 3, 19: 5}
    loops = tuple(Loop(to, at + 1) for at, to in branches.items() if to < at)
    found = of_consumers(Code(tuple(code), loops, tuple(branches.items())), 1, 1, 1, False)
    assert found == Paths(
        before=tuple(code[:3]),
        whole=(*code[3:9], *code[12:14]),
        last=(*code[3:9], *code[12:14]),
        masked=tuple(code[3:14]),
        after=tuple(code[14:16]),
    )


def test_paths_pass_the_stated_number_of_waits():
    """The second wait of the loop is for a tile that the last iteration does not have."""
    loop = [WAIT, PRODUCT, EXP, branch("@P1"), WAIT, RELEASE, branch("@P2"), EXIT]
    code = Code(tuple(loop), (Loop(0, 7),), ((3, 5), (6, 0)))
    found = of_consumers(code, 0, 2, 1, False)
    assert found.whole == tuple(loop[:7])
    assert found.last == (*loop[:4], *loop[5:7])


def test_paths_of_persistent_blocks_are_those_of_the_loop_over_blocks():
    code = [
        *(ADD, WAIT, branch("@!P0"), branch("@P3")),  # 0: once; the loop over blocks begins at 1
        *(WAIT, PRODUCT, EXP, branch("@P1")),  # 4: the loop over tiles
        *(RELEASE, branch(), EXIT),  # 8: the end of the loop over blocks
        *(WAIT, branch()),  # 11: a retry, which is not a loop over blocks
    ]
    branches = {2: 11, 3: 10, 7: 4, 9: 1, 12: 3}
    loops = tuple(Loop(to, at + 1) for at, to in branches.items() if to < at)
    found = of_consumers(Code(tuple(code), loops, tuple(branches.items())), 1, 1, 1, True)
    assert found.before == tuple(code[1:4])
    assert found.after == tuple(code[8:10])


def test_paths_of_summing_warps_repeat_nested_loops():
    code = [
        *(WAIT, branch("@!P0")),  # 0: the loop over tiles; its wait is retried at 16
        *(ADD, TERM, ADD, branch("@P0"), ADD, branch("@P1")),  # 2: loops at 2 and, in it, at 3
        *(branch("@P2"), OTHER_TERM, branch("@P3")),  # 8: few tiles sum once more, in a loop
        *(RELEASE, branch("@P4")),  # 11
        *(WAIT, PRODUCT, EXP, branch("@P0"), EXIT),  # 13: the loop of a warp that computes
        *(WAIT, branch()),  # 18: the retry
    ]
    branches = {1: 18, 5: 3, 7: 2, 8: 11, 10: 9, 12: 0, 16: 13, 19: 2}
    loops = tuple(Loop(to, at + 1) for at, to in sorted(branches.items()) if to < at)
    loops = tuple(sorted(loops, key=lambda loop: (loop.begin, -loop.end)))
    code = Code(tuple(code), loops, tuple(branches.items()))
    body = code.instructions
    of_outer = body[2:3] + 2 * body[3:6] + body[6:8]
    expected = body[:2] + 4 * of_outer + body[8:9] + body[11:13]
    assert of_summer(code, 1, {"HMMA": 4 * 2}, outer=(4,)) == expected
    with pytest.raises(ValueError, match=r"'HMMA': 7} for a tile, but found .*'HMMA': 4"):
        of_summer(code, 1, {"HMMA": 7}, outer=(4,))


@NEEDS_NVRTC
@pytest.mark.slow
@pytest.mark.skipif(not EMULATED, reason="counts what the emulator executes")
@pytest.mark.parametrize(
    ("form", "causal"), [("none", False), ("cumulative-gain", False), ("cumulative-gain", True)]
)
def test_emulated_kernels_execute_the_paths(form, causal, seed, monkeypatch):
    """Executes two or three kernels, in a few seconds. Masks need no other products."""
    counts = []
    launch = cuda_driver.launch
    monkeypatch.setattr(
        cuda_driver, "launch", lambda *args, **kwargs: counts.append(launch(*args, **kwargs))
    )
    n, heads = 384, 2
    case = Case(form, torch.bfloat16, (n, n), (64, 64), (heads, heads), batch=1, causal=causal)
    with emulated(Launcher(cuda_driver.EmulatedDriver(seed))):
        check(drawn(case))
    name = {"none": "None", "cumulative-gain": "CumulativeWithGain"}[form]
    problem = Problem(1, heads, n, 64, causal)
    names = FORWARD, *backward(name, 64, causal)
    assert (ALL in names) == (form == "none" or causal)
    for kernel in (build(x, name, 64, form != "none" and x != FORWARD) for x in names):
        (of_launch,) = (x for x in counts if kernel.variant.kernel in x.kernel.name)
        tiles = times.tiles_of_blocks(kernel, problem)
        ahead = kernel.name not in OF_KEYS  # the tile before the loop
        executed = Counter()
        for path, repeats in (
            (kernel.paths.before, kernel.warps * len(tiles)),
            (kernel.paths.whole, kernel.warps * (sum(tiles) - (ahead + 1) * len(tiles))),
            (kernel.paths.last, kernel.warps * len(tiles)),
            (kernel.paths.after, kernel.warps * len(tiles)),
            *((path, sum(tiles)) for _, path in kernel.summers),
        ):
            for one in path:
                executed[one.opcode if one.name == "MUFU" else one.name] += repeats * heads
        ptx = {"HGMMA": "wgmma.mma", "MUFU.EX2": "ex2", "HMMA": "mma.sync"}
        for opcode, of_ptx in ptx.items():
            emulated_ones = (n for x, n in of_launch.by_opcode.items() if x.startswith(of_ptx))
            assert executed[opcode] == sum(emulated_ones)
        assert (executed["HMMA"] > 0) == (kernel.name == ALL and form != "none")


# Simulation

# A product of 64 x 128 x 16 takes 64 cycles of the matrix units.
PRODUCTS = [instruction(PRODUCT.opcode, PRODUCT.operands.removesuffix(", gsb0"))] * 15 + [PRODUCT]
CYCLES = 64 * len(PRODUCTS)
TAKE = instruction("BAR.SYNC.DEFER_BLOCKING", "R0, 0x100")
PASS = instruction("BAR.ARV", "R2, 0x100")


def cycles_of_a_tile(loop: list[Instruction], size: int = 0, stages: int = 2) -> float:
    """The cycles of each tile, of `size` bytes, in a steady state."""
    of_tile = steps(loop, ["tiles"], ["tiles"], H100)
    copies = [Copy("tiles", size, stages)]
    few, many = (OneBlock(of_tile * n, 2, copies * n, H100, 400).run() for n in (6, 16))
    return (many - few) / 10


def test_products_of_both_groups_share_the_matrix_units():
    loop = [WAIT, *PRODUCTS, FINISH, RELEASE]
    assert cycles_of_a_tile(loop, stages=3) == pytest.approx(2 * CYCLES, rel=0.05)


def test_other_work_of_a_group_coincides_with_products_of_the_other():
    work = [ADD] * (CYCLES // 4 - 50)
    loop = [WAIT, *PRODUCTS, FINISH, *work, RELEASE]
    assert cycles_of_a_tile(loop, stages=3) == pytest.approx(2 * CYCLES, rel=0.1)
    # In turns, each group starts after the other one has issued its products.
    turns = [WAIT, TAKE, *PRODUCTS, PASS, FINISH, *work, RELEASE]
    assert cycles_of_a_tile(turns, stages=3) == pytest.approx(2 * CYCLES, rel=0.1)
    # More work than the other group's products hide, as a group does it after its own.
    long = [WAIT, *PRODUCTS, FINISH, *work, *work, RELEASE]
    assert cycles_of_a_tile(long, stages=3) > 2.5 * CYCLES


def test_tiles_arrive_at_the_rate_of_the_cache():
    loop = [WAIT, ADD, RELEASE]
    size = 80_000
    assert cycles_of_a_tile(loop, size, stages=8) == pytest.approx(size / H100.l2_bytes, rel=0.01)
    # With one stage, the latency of each copy is added.
    alone = cycles_of_a_tile(loop, size, stages=1)
    assert alone - size / H100.l2_bytes == pytest.approx(400 + simulate.ISSUE_CYCLES, abs=100)


def test_copies_delay_products_that_leave_no_bandwidth():
    """Products with both operands in shared memory read it all the time."""
    operands = "R24, gdesc[UR4], R24"
    products = [instruction("HGMMA.64x64x16.F32.BF16", operands)] * 63
    products.append(instruction("HGMMA.64x64x16.F32.BF16", f"{operands}, gsb0"))
    loop = [WAIT, *products, FINISH, RELEASE]
    size = 65536
    added = cycles_of_a_tile(loop, size, stages=4) - cycles_of_a_tile(loop, 0, stages=4)
    assert added == pytest.approx(size / 128, rel=0.25)


def cycles_of_handovers(loop: list, handovers: list[Handover], summer: list | None = None) -> float:
    """The same as cycles_of_a_tile, with handovers and perhaps a warp that sums."""
    times = []
    for n in (6, 16):
        programs = [summer * n] if summer else []
        copies = [Copy("tiles", 0, 3)] * n
        times.append(OneBlock(loop * n, 2, copies, H100, 400, handovers, programs).run())
    return (times[1] - times[0]) / 10


@pytest.mark.parametrize("ahead", [1, 2])
def test_what_is_copied_from_shared_memory_frees_it_later(ahead):
    size = 16_000
    events = ["tiles", "free"], ["full", "tiles"]
    loop = steps([WAIT, WAIT, ADD, RELEASE, RELEASE], *events, H100)
    found = cycles_of_handovers(loop, [Handover("full", "free", ahead, size)])
    # The latency of a copy, and its turn in the cache; copies of two places overlap.
    expected = max(size / H100.l2_bytes, (size / H100.l2_bytes + 400) / ahead)
    assert found == pytest.approx(expected, abs=100)


def test_warps_that_compute_wait_for_one_that_sums():
    """Both read what the former write together, into one place."""
    events = ["tiles", "read dS", "dS"], ["dS", "read dS", "tiles"]
    path = [WAIT, WAIT, RELEASE, WAIT, ADD, RELEASE, RELEASE]
    loop = steps(path, *events, H100)
    handovers = [Handover("dS", "dS"), Handover("read dS", "read dS", ahead=1)]
    alone = cycles_of_handovers(loop, handovers)
    work = [ADD] * 500
    summer = steps([WAIT, *work, RELEASE], ["dS"], ["read dS"], H100)
    with_summer = cycles_of_handovers(loop, handovers, summer)
    assert alone < 300
    assert with_summer == pytest.approx(4 * len(work), abs=alone)


def test_products_of_a_warp_delay_those_of_groups():
    path = [WAIT, *PRODUCTS, FINISH, RELEASE, RELEASE]
    loop = steps(path, ["tiles"], ["done", "tiles"], H100)
    handovers = [Handover("done", "done")]
    terms = [instruction(TERM.opcode, TERM.operands)] * 50
    summer = steps([WAIT, *terms], ["done"], [], H100)
    added = cycles_of_handovers(loop, handovers, summer) - cycles_of_handovers(loop, handovers)
    (product,) = summer[1].uses
    assert added == pytest.approx(len(terms) * product.cycles, rel=0.1)


def test_missing_events_are_errors():
    with pytest.raises(ValueError, match="a path without waits for"):
        steps([WAIT], ["tiles", "tiles"], [], H100)
    of_tile = steps([WAIT, ADD], ["tiles"], [], H100)  # is never released
    with pytest.raises(RuntimeError, match="nothing signals"):
        OneBlock(of_tile * 4, 2, [Copy("tiles", 0, 2)] * 4, H100, 400).run()


# Turns

COSTS = Costs(block=10, tile=100, write=20, passing=5)


def blocks_of_a_head(count: int) -> list[Blocks]:
    return [Blocks([0], range(2))] * count


def test_blocks_add_after_those_of_earlier_keys():
    # The first block adds from 110 and 210 on, the second one when it has the turn: at 135 and 235.
    assert turns.last_end(blocks_of_a_head(1), COSTS, 2) == 230
    assert turns.last_end(blocks_of_a_head(2), COSTS, 2) == 255
    # After one another, neither waits: the second one adds at 340 and 440.
    assert turns.last_end(blocks_of_a_head(2), COSTS, 1) == 460


def test_blocks_compute_one_tile_while_they_wait_for_a_turn():
    # The second block has the turn at 440 and, as it has computed the next tile, again at 540.
    costs = replace(COSTS, passing=310)
    assert turns.last_end(blocks_of_a_head(2), costs, 2) == 540 + 20
    # It does not compute a third tile until 440, when shared memory has room for the second one.
    blocks = [Blocks([0], range(2, 3)), Blocks([0], range(3))]
    assert turns.last_end(blocks, costs, 2) == 440 + 100 + 20


def test_heads_do_not_wait_for_one_another():
    assert turns.last_end([Blocks([0, 1], range(2))], COSTS, 2) == 230
    assert turns.last_end([Blocks([0, 1], range(2))], COSTS, 1) == 460
    # Blocks do not wait for tiles that no earlier one has.
    assert turns.last_end([Blocks([0], range(2, 4)), Blocks([0], range(2))], COSTS, 2) == 230


# Tiles


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", [FORWARD, DQ, DKV, ALL])
def test_tiles_are_those_with_visible_pairs(name, causal, seed):
    n, block_n = 128 * random.randrange(1, 6), random.choice((64, 128))
    queries, keys = torch.arange(n)[:, None], torch.arange(n)
    sees = (keys <= queries) | (not causal)
    kernel = rows_of(name, block_n)
    found = times.tiles_of_blocks(kernel, Problem(1, 1, n, 64, causal))
    assert found == sorted(visible_tiles(sees, kernel), reverse=True)


def rows_of(name: str, block_n: int) -> SimpleNamespace:
    """What the functions need of a kernel."""
    block_m = random.choice((128, 192)) if name == FORWARD else 128
    return SimpleNamespace(name=name, block_m=block_m, block_n=block_n)


def visible_tiles(sees: torch.Tensor, kernel: SimpleNamespace) -> list[int]:
    """The tiles of each block of queries, or of keys, with a visible pair."""
    if kernel.name in OF_KEYS:
        sees = sees.T
    n, block_n = len(sees), kernel.block_n
    blocks = (rows.reshape(-1, n // block_n, block_n) for rows in sees.split(kernel.block_m))
    return [int(rows.any(2).any(0).sum()) for rows in blocks]


@pytest.mark.parametrize("name", [FORWARD, ALL])
def test_tiles_of_plans_are_those_with_planned_pairs(name, seed):
    blocks, block_n = random.randrange(2, 8), random.choice((64, 128))
    n = 128 * blocks
    # Plans begin at multiples of 64 keys, and do not decrease.
    first = torch.tensor(sorted(64 * random.randrange(2 * b + 1) for b in range(blocks)))
    first = torch.minimum(first // block_n * block_n, torch.arange(blocks) * 128)
    queries, keys = torch.arange(n)[:, None], torch.arange(n)
    sees = (keys <= queries) & (keys >= first.repeat_interleave(128)[:, None])
    kernel = rows_of(name, block_n)
    if name == ALL:
        found = skipping.blocks_of_keys(kernel, first[None], n)
        assert [len(block.tiles) for block in found] == visible_tiles(sees, kernel)
        begin = [128 * block // block_n for block in range(blocks)]
        assert [block.tiles.start for block in found] == begin
        return
    found = skipping.tiles_of_blocks(kernel, first[None], n)
    assert sorted(found) == sorted(visible_tiles(sees, kernel))


def test_blocks_of_keys_start_with_those_before_long_ones():
    """As early as the longest block of a head that follows: of head 1, the second block."""
    first = torch.tensor([[0, 0, 256], [0, 128, 128]])
    found = skipping.blocks_of_keys(rows_of(ALL, 64), first, 384)
    order = [(block.heads[0], block.tiles.start // 2, block.tiles.stop) for block in found]
    assert order == [(0, 0, 4), (1, 0, 2), (1, 1, 6), (0, 1, 4), (0, 2, 6), (1, 2, 6)]


# Tables


def test_published_timings_agree_with_quoted_rates():
    rates = {
        (row.source, row.backward, row.problem.causal): round(row.tflops)
        for row in published.ROWS
        if (row.problem.n, row.problem.head_dim) == (16384, 128)
    }
    assert rates == {
        (published.FLASH, False, False): 648,
        (published.FLASH, False, True): 616,
        (published.FLASH, True, False): 561,
        (published.MOSAIC, False, False): 666,
        (published.MOSAIC, False, True): 636,
        (published.MOSAIC, True, False): 455,
        (published.MOSAIC, True, True): 452,
        (published.CUDNN, False, False): 694,
        (published.CUDNN, False, True): 645,
    }


def test_most_rows_of_similar_kernels_are_predicted():
    fitted = [row.is_fitted for row in published.ROWS if row.is_alike]
    assert 0 < sum(fitted) < len(fitted) / 2


def test_stated_error_is_that_of_similar_kernels():
    document = run.RESULT.read_text()
    assert "**Estimates, not measurements: none of these kernels has been timed.**" in document
    rows = (line for line in document.splitlines() if line.endswith("| predicted |"))
    errors = sorted(abs(int(re.search(r"([+-]\d+)%", row)[1])) for row in rows)
    assert len(errors) == sum(row.is_alike and not row.is_fitted for row in published.ROWS)
    found = errors[math.ceil(FRACTION * len(errors)) - 1]
    stated = int(re.search(r"error of each is\n±(\d+)%", document)[1])
    assert abs(stated - found) <= 1


@NEEDS_NVRTC
@pytest.mark.slow
def test_committed_estimates_are_current():
    """Compiles and simulates two of the kernels, in some seconds."""
    document = run.RESULT.read_text()
    if f"NVRTC {'.'.join(map(str, nvrtc.version()))} " not in document:
        pytest.skip("the estimates are of another version of NVRTC")
    command = "-m", "bench.estimates.cuda.run", "--head-dim", "64", "--form", "Cumulative"
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.split("\n\n")[1].splitlines() if "forget gate" in line]
    assert len(rows) == 2
    renew = "run `python -m bench.estimates.cuda.run` to renew it"
    assert [row for row in rows if row not in document.splitlines()] == [], renew
