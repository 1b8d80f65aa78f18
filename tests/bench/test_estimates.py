"""Speed estimates of compiled kernels, and the committed tables of estimates."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="needs Triton")

import triton

from bench import RESULTS, ROOT
from bench.estimates import calibration, published, report, tiles, times
from bench.estimates.gpu import A100, GPUS, H100
from bench.estimates.iteration import iteration

# Compiles in another process, which replaces Triton's driver.
COMPILE = """
import pickle, sys
from bench.estimates import kernels, tiles
names = tiles.FORWARD, tiles.DQ, tiles.DKV
built = [kernels.build(arch, name, "none", 64) for arch in (80, 90) for name in names]
sys.stdout.buffer.write(pickle.dumps(built))
"""


def in_another_process(*command: str) -> bytes:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.fixture(scope="module")
def kernels():
    """Six kernels, compiled for two GPUs in some seconds."""
    built = pickle.loads(in_another_process("-c", COMPILE))
    return [(gpu, one) for gpu, one in zip([A100] * 3 + [H100] * 3, built, strict=True)]


@pytest.mark.slow
def test_loops_of_the_code_match_the_counted_tiles(kernels):
    for _, kernel in kernels:
        tiling = tiles.tiling("none", True, 4096, kernel.block_m, kernel.block_n)
        assert len(kernel.code.loops) == len(tiles.passes(kernel.name, tiling)[0])


COMPILE_FORMS = """
import pickle, sys
from bench.estimates import kernels, report
forms = {"dense": 90, "normalized": 80, "relative": 90, "relative_last": 90}
built = [
    kernels.build(arch, name, form, 64, trained=True)
    for form, arch in forms.items()
    for name in report.NAMES
    if form in report.FORMS_WITH.get(name, forms)
]
sys.stdout.buffer.write(pickle.dumps(built))
"""


@pytest.fixture(scope="module")
def kernels_of_forms():
    """The kernels of forms whose bias takes work for each pair, compiled in about a minute."""
    return pickle.loads(in_another_process("-c", COMPILE_FORMS))


@pytest.mark.slow
def test_loops_of_all_forms_match_the_counted_tiles(kernels_of_forms):
    for kernel in kernels_of_forms:
        tiling = tiles.tiling(kernel.form, True, 65536, kernel.block_m, kernel.block_n)
        passes = tiles.passes(kernel.name, tiling)
        loops = kernel.code.outer_loops
        assert [len(loops)] * len(passes) == [len(block) for block in passes], kernel
        counts = [sum(of_loop) for of_loop in zip(*passes, strict=True)]
        most = loops[counts.index(max(counts))]
        assert times.whole_loop(kernel) == iteration(kernel.code, most, kernel.form)


@pytest.mark.slow
def test_only_a_normalized_bias_has_loops_in_loops(kernels_of_forms):
    for kernel in kernels_of_forms:
        code, is_normalized = kernel.code, kernel.form == "normalized"
        paths = [iteration(code, loop, kernel.form) for loop in code.outer_loops]
        bodies = [code.body(loop) for loop in code.outer_loops]
        assert (len(code.loops) > len(code.outer_loops)) == is_normalized
        assert is_normalized or paths == bodies
        # Products and exponentials do not depend on segments.
        for names in ("MUFU", "HMMA", "HGMMA"):
            counts = [[sum(x.name == names for x in y) for y in z] for z in (paths, bodies)]
            assert counts[0] == counts[1], kernel


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "forms"),
    [
        (300, ("none", "linear", "dense", "normalized", "relative_last")),
        # A table has no factors for a partial block of queries, which the estimate ignores.
        (384, ("distance",)),
        (1300, ("relative",)),
    ],
)
def test_counted_tiles_are_those_of_the_kernels(n, forms):
    printed = in_another_process("-m", "tests.bench.counted_tiles", str(n), *forms)
    counted = json.loads(printed)
    assert {form for form, *_ in counted} == set(forms)
    for form, causal, kernel, block_m, block_n, found in counted:
        expected = tiles.passes(kernel, tiles.tiling(form, causal, n, block_m, block_n))
        # Programs of blocks of queries start with the last block.
        if kernel in (tiles.FORWARD, tiles.DQ):
            found.reverse()
        assert expected == found, (form, causal, kernel)


@pytest.mark.slow
def test_the_loop_over_full_tiles_runs_most_often(kernels):
    for _, kernel in kernels:
        tiling = tiles.tiling("none", True, 65536, kernel.block_m, kernel.block_n)
        counts = [sum(of_loop) for of_loop in zip(*tiles.passes(kernel.name, tiling), strict=True)]
        most = kernel.code.loops[counts.index(max(counts))]
        assert times.whole_loop(kernel) == kernel.code.body(most)


@pytest.mark.slow
def test_a_pass_has_the_instructions_of_one_tile(kernels):
    for gpu, kernel in kernels:
        loop, pairs = times.whole_loop(kernel), kernel.block_m * kernel.block_n
        exponentials = 32 * kernel.warps * sum(one.opcode == "MUFU.EX2" for one in loop)
        # The forward pass also has those of its rescaling, in four lanes of each row.
        rescaling = 4 * kernel.block_m if kernel.name == tiles.FORWARD else 0
        repeated = times.repeated_products(kernel)
        assert exponentials == repeated * pairs + rescaling
        # On Ampere a warp computes 16 rows of a tile. Warps without rows repeat the work of others.
        rows = kernel.block_n if kernel.name == tiles.DKV else kernel.block_m
        assert repeated == (max(1, 16 * kernel.warps / rows) if gpu is A100 else 1)


@pytest.mark.slow
def test_reads_of_loaded_values_wait_for_their_scoreboard(kernels):
    """This confirms the positions of the control fields."""
    checked = 0
    for _, kernel in kernels:
        loop = times.whole_loop(kernel)
        for at, one in enumerate(loop):
            if one.name not in ("LDS", "LDSM", "SHFL") or one.never_runs or one.sets == 7:
                continue
            register, waited = re.search(r"\bR\d+", one.operands)[0], 0
            for other in loop[at + 1 :]:
                waited |= other.waits
                if re.search(rf"\b{register}\b", other.operands):
                    assert waited >> one.sets & 1, (one, other)
                    checked += 1
                    break
    assert checked > 100


@pytest.mark.slow
def test_no_estimate_is_faster_than_the_peak_rate(kernels, kernels_of_forms):
    problem = times.Problem(4, 32, 4096, 64)
    # The gradient of the tables of a band includes few of the pairs.
    others = [(H100, x) for x in kernels_of_forms if x.form != "normalized"]
    others = [(gpu, x) for gpu, x in others if (x.form, x.name) != ("relative", tiles.RELATIVE)]
    for gpu, kernel in (*kernels, *others):
        found = times.estimate(kernel, gpu, problem)
        # Causal kernels compute half of the pairs, plus parts of tiles on the diagonal.
        flops = problem.flops * times.PRODUCTS[kernel.name] / 2
        assert flops / found.milliseconds * 1e-9 < gpu.peak
        assert kernel.form == "dense" or not found.bound_by_memory


@pytest.mark.slow
def test_a_dense_bias_and_its_gradient_are_read_and_written_once(kernels_of_forms):
    problem = times.Problem(1, 16, 4096, 64)
    dense = {one.name: one for one in kernels_of_forms if one.form == "dense"}
    slow, pairs = replace(H100, hbm=1e-3), 16 * 4096**2
    rows = 2 * 16 * 4096 * 64
    for name, tensors, of_pairs in ((tiles.FORWARD, 4, 1), (tiles.DQ, 5, 2), (tiles.DKV, 6, 1)):
        found = times.estimate(dense[name], slow, problem)
        expected = tensors * rows + of_pairs * 4 * pairs / 2
        assert found.bound_by_memory
        assert found.milliseconds == pytest.approx(expected / 1e-3 * 1e-6)
    assert times.clearing("dense", slow, problem) == pytest.approx(4 * pairs / 1e-3 * 1e-6)
    assert times.clearing("relative", slow, problem) == 0


@pytest.mark.slow
def test_short_problems_are_bound_by_memory(kernels):
    gpu, kernel = kernels[0]
    slow = replace(gpu, hbm=1e-3)
    found = times.estimate(kernel, slow, times.Problem(1, 32, 512, 64))
    assert found.bound_by_memory
    assert found.milliseconds == pytest.approx(4 * 2 * 32 * 512 * 64 / 1e-3 * 1e-6)


@pytest.mark.slow
def test_blocks_share_registers_shared_memory_and_warps(kernels):
    gpu, kernel = kernels[0]
    small = replace(kernel, registers=32, shared=0, warps=4)
    assert small.blocks_at_once(gpu) == 64 // 4
    assert replace(small, registers=250).blocks_at_once(gpu) == 65536 // (256 * 32 * 4)
    assert replace(small, shared=80 * 1024).blocks_at_once(gpu) == 2
    too_large = replace(small, shared=200 * 1024)
    assert too_large.blocks_at_once(gpu) == 0
    with pytest.raises(ValueError, match="registers or shared memory than A100"):
        times.estimate(too_large, gpu, times.Problem(1, 1, 512, 64))


def test_blocks_start_in_the_first_free_slot():
    assert times.last_end([3.0], groups=7, places=3) == 9
    # 5 and 4, then 3 after the 4, 2 after the 5, and 1 after either.
    assert times.last_end([5.0, 4.0, 3.0, 2.0, 1.0], groups=1, places=2) == 8
    assert times.last_end([1.0, 2.0, 3.0, 4.0, 5.0], groups=1, places=2) == 9


def test_stated_error_covers_nine_of_ten_predicted_rows():
    row = next(row for row in published.ROWS if not row.is_fitted)
    fitted = calibration.Prediction(replace(row, is_fitted=True), 9 * row.milliseconds)
    errors = [0.01 * (-1) ** n * n for n in range(1, 11)]
    predicted = [calibration.Prediction(row, row.milliseconds * (1 + one)) for one in errors]
    assert calibration.stated_error([fitted, *predicted]) == pytest.approx(0.09)


def test_published_timings_agree_with_quoted_rates():
    """Triton's tutorial has 378 TFLOP/s, FlashAttention-2 335, and Pallas-Triton 361 forward and
    338 backward."""
    rates = set()
    for row in published.ROWS:
        flops = times.Problem(row.batch, row.heads, row.n, row.head_dim, row.causal).flops
        flops *= times.BACKWARD if row.backward else 1
        if row.arch == 90 and row.causal and (row.n, row.head_dim) == (16384, 128):
            rates.add((row.source, round(flops / row.milliseconds * 1e-9)))
    assert rates == {
        (published.TOKAMAX, 361),
        (published.TOKAMAX, 338),
        (published.TUTORIAL, 378),
        (published.FLASH, 335),
    }


def test_most_rows_of_each_gpu_are_predicted():
    for arch in GPUS:
        fitted = [row.is_fitted for row in published.ROWS if row.arch == arch]
        assert 0 < sum(fitted) < len(fitted) / 2


def estimates_of_alibi(*options: str) -> list[str]:
    """The rows of three kernels, which are compiled and simulated in a few seconds."""
    command = "-m", "bench.estimates.run", "--arch", "90", "--head-dim", "64", "--form", "linear"
    printed = in_another_process(*command, *options).decode()
    rows = [line for line in printed.split("\n\n")[1].splitlines() if "ALiBi" in line]
    assert len(rows) == 3
    return rows


@pytest.mark.slow
def test_committed_estimates_are_current():
    document = (RESULTS / "estimates-sm_90.md").read_text()
    if f"Triton {triton.__version__} " not in document:
        pytest.skip("the estimates are of another version of Triton")
    renew = "run `python -m bench.estimates.run` to renew it"
    assert [row for row in estimates_of_alibi() if row not in document.splitlines()] == [], renew


@pytest.mark.slow
def test_estimates_are_of_the_given_problem():
    committed = estimates_of_alibi()
    assert estimates_of_alibi("--batch", "2", "--heads", "16") == committed
    for row, shorter in zip(committed, estimates_of_alibi("--tokens", "4096"), strict=True):
        times = [float(one.split("|")[-2]) for one in (row, shorter)]
        assert times[0] / times[1] == pytest.approx(16, rel=0.2)


# Each bias, and one that computes the same and more.
SIMPLER = (
    ("none", "linear"),
    ("none", "dense"),
    ("none", "relative"),
    ("linear", "cumulative"),
    ("linear", "distance"),
    ("cumulative", "cumulative-gain"),
    ("cumulative", "log1p_square-gain"),
    ("distance", "normalized"),
    ("relative", "relative_last"),
)


@pytest.mark.parametrize("arch", GPUS)
def test_no_bias_is_slower_than_one_that_computes_more(arch):
    """By more than the error of the estimates; otherwise another configuration was better."""
    document = (RESULTS / f"estimates-sm_{arch}.md").read_text()
    rows = [line.strip("|").split("|") for line in document.splitlines()]
    kernels = [
        [cell.strip() for cell in row] for row in rows if len(row) == len(report.KERNEL_COLUMNS)
    ]
    times = {(form, width, name): ms for form, width, name, *_, ms in kernels[1:]}
    names = report.NAMES[tiles.FORWARD], report.NAMES[tiles.DQ], report.NAMES[tiles.DKV]
    for (simple, other), width, name in itertools.product(SIMPLER, ("64", "128"), names):
        less, more = (float(times[report.FORMS[form], width, name]) for form in (simple, other))
        assert less <= (1 + _stated_error(document)) * more, (simple, other, width, name)


def test_estimates_are_labelled_with_their_error():
    for arch in GPUS:
        document = (RESULTS / f"estimates-sm_{arch}.md").read_text()
        assert "**Estimates, not measurements: none of these kernels has been timed.**" in document
        assert math.isclose(
            _stated_error(document),
            _error_of(document),
            abs_tol=0.006,
        )


def _stated_error(document: str) -> float:
    return int(re.search(r"error of each is\n±(\d+)%", document)[1]) / 100


def _error_of(document: str) -> float:
    """The error of the calibration table, in which errors are rounded to percents."""
    rows = (line for line in document.splitlines() if line.endswith("| predicted |"))
    errors = sorted(abs(int(re.search(r"([+-]\d+)%", row)[1])) for row in rows)
    return errors[math.ceil(0.9 * len(errors)) - 1] / 100
