"""Speed estimates of compiled kernels."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="needs Triton")


from bench.estimates import calibration, published, tiles, times
from bench.estimates.gpu import A100, GPUS, H100
from bench.estimates.iteration import iteration
from tests.bench.processes import in_another_process

# Compiles in another process, which replaces Triton's driver.
COMPILE = """
import pickle, sys
from bench.estimates import kernels, tiles
names = tiles.FORWARD, tiles.DQ, tiles.DKV
built = [kernels.build(arch, name, "none", 64) for arch in (80, 90) for name in names]
sys.stdout.buffer.write(pickle.dumps(built))
"""


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
