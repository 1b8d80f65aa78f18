"""The model of speed estimates of the CUDA kernels, and the committed tables."""

from __future__ import annotations

import math
import random
import re
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton's tools")

from bench import ROOT
from bench.estimates.calibration import FRACTION
from bench.estimates.cuda import published, run, simulate, skipping, times
from bench.estimates.cuda.kernels import DKV, DQ, FORWARD, build
from bench.estimates.cuda.paths import Paths, of_consumers
from bench.estimates.cuda.simulate import Copy, OneBlock, steps
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


@NEEDS_NVRTC
@pytest.mark.slow
@pytest.mark.skipif(not EMULATED, reason="counts what the emulator executes")
@pytest.mark.parametrize("form", ["none", "cumulative-gain"])
def test_emulated_kernels_execute_the_paths(form, seed, monkeypatch):
    """Executes three kernels, in a few seconds: without a mask, blocks have equal tiles."""
    counts = []
    launch = cuda_driver.launch
    monkeypatch.setattr(
        cuda_driver, "launch", lambda *args, **kwargs: counts.append(launch(*args, **kwargs))
    )
    n, heads = 384, 2
    case = Case(form, torch.bfloat16, (n, n), (64, 64), (heads, heads), batch=1, causal=False)
    with emulated(Launcher(cuda_driver.EmulatedDriver(seed))):
        check(drawn(case))
    name = {"none": "None", "cumulative-gain": "CumulativeWithGain"}[form]
    problem = Problem(1, heads, n, 64, causal=False)
    checked = 0
    for kernel in (build(x, name, 64, form != "none" and x != FORWARD) for x in (FORWARD, DQ, DKV)):
        (of_launch,) = (x for x in counts if kernel.variant.kernel in x.kernel.name)
        tiles = times.tiles_of_blocks(kernel, problem)
        ahead = kernel.name != DKV  # the tile before the loop
        executed = Counter()
        for path, repeats in (
            (kernel.paths.before, len(tiles)),
            (kernel.paths.whole, sum(tiles) - (ahead + 1) * len(tiles)),
            (kernel.paths.last, len(tiles)),
            (kernel.paths.after, len(tiles)),
        ):
            for one in path:
                executed[one.name if one.name == "HGMMA" else one.opcode] += (
                    repeats * heads * kernel.warps
                )
        for opcode, of_ptx in (("HGMMA", "wgmma.mma"), ("MUFU.EX2", "ex2")):
            emulated_ones = (n for x, n in of_launch.by_opcode.items() if x.startswith(of_ptx))
            assert executed[opcode] == sum(emulated_ones)
        checked += 1
    assert checked == 3


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


def test_missing_events_are_errors():
    with pytest.raises(ValueError, match="a path without waits for"):
        steps([WAIT], ["tiles", "tiles"], [], H100)
    of_tile = steps([WAIT, ADD], ["tiles"], [], H100)  # is never released
    with pytest.raises(RuntimeError, match="nothing signals"):
        OneBlock(of_tile * 4, 2, [Copy("tiles", 0, 2)] * 4, H100, 400).run()


# Tiles


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", [FORWARD, DQ, DKV])
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
    if kernel.name == DKV:
        sees = sees.T
    n, block_n = len(sees), kernel.block_n
    blocks = (rows.reshape(-1, n // block_n, block_n) for rows in sees.split(kernel.block_m))
    return [int(rows.any(2).any(0).sum()) for rows in blocks]


@pytest.mark.parametrize("name", [FORWARD, DQ, DKV])
def test_tiles_of_plans_are_those_with_planned_pairs(name, seed):
    blocks, block_n = random.randrange(2, 8), random.choice((64, 128))
    n = 128 * blocks
    # Plans begin at multiples of 64 keys, and do not decrease.
    first = torch.tensor(sorted(64 * random.randrange(2 * b + 1) for b in range(blocks)))
    first = torch.minimum(first // block_n * block_n, torch.arange(blocks) * 128)
    queries, keys = torch.arange(n)[:, None], torch.arange(n)
    sees = (keys <= queries) & (keys >= first.repeat_interleave(128)[:, None])
    kernel = rows_of(name, block_n)
    found = skipping.tiles_of_blocks(kernel, first[None], n)
    assert sorted(found) == sorted(visible_tiles(sees, kernel))


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
    """Compiles and simulates three of the kernels, in some seconds."""
    document = run.RESULT.read_text()
    if f"NVRTC {'.'.join(map(str, nvrtc.version()))} " not in document:
        pytest.skip("the estimates are of another version of NVRTC")
    command = "-m", "bench.estimates.cuda.run", "--head-dim", "64", "--form", "Cumulative"
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.split("\n\n")[1].splitlines() if "forget gate" in line]
    assert len(rows) == 3
    renew = "run `python -m bench.estimates.cuda.run` to renew it"
    assert [row for row in rows if row not in document.splitlines()] == [], renew
