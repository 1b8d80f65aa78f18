"""What the compiler makes of the Triton kernels for GPUs that need not be present.

A run compiles a sample (compiled_sample.py) and what a part of the table of instructions needs;
with --kernel-pairs it compiles more kernels, and what all of the table needs.
"""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module

import pytest

from bench import RESULTS, ROOT
from bench.machine_code import instructions
from biased_flash_attn.shared_memory import block_bytes

compiled = pytest.importorskip("bench.machine_code.compiled", reason="needs Triton")
compiled_sample = pytest.importorskip("tests.kernels.triton.compiled_sample", reason="needs Triton")

pytestmark = pytest.mark.slow
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# Instructions of loops that may move registers to memory and back. The one is a scalar that ptxas
# keeps in memory although registers are free; on sm_120 it keeps up to five. For sm_86, sm_89 and
# sm_120, kernels outside the samples have not all been compiled, and may have more. Some loops read
# their constants again: those for dk and dv, those of relative biases and, on sm_80 and sm_90,
# those of dense and normalized biases. Their tiles are estimated to be 1.2 to 5 times as fast as
# smaller ones that need not. With heads of 256, no tile of both terms is small enough in float32.
SPILLS = {80: 1, 86: 1, 89: 1, 90: 1, 100: 1, 120: 5}
SPILLS_OF_LARGE_TILES = 32  # for dk and dv of heads of 128, with mma.sync
SPILLS_OF_FAST_TILES = 200  # those of relative, dense and normalized biases in half precision
STORES_OF_FAST_TILES = 8  # of these, to memory; those of relative biases have more
SPILLS_OF_RELATIVE = 10  # in float32
SPILLS_OF_WIDEST_RELATIVE = 380
WITH_PRODUCTS = (
    "attn_fwd_kernel",
    "attn_bwd_dq_kernel",
    "attn_bwd_dkv_kernel",
    "attn_bwd_table_kernel",
    "attn_bwd_relative_kernel",
    "attn_trim_kernel",
    "attn_choose_kernel",
    "attn_decode_kernel",
)


def counted(forms: Iterable[str], widths: Iterable[int]) -> list:
    """What the table of instructions counts, on Hopper."""
    kernels = instructions.FORWARD, instructions.DQ, instructions.DKV
    return [
        task
        for task in compiled.tasks(widths)
        if task.form in forms and task.dtype == "bfloat16" and task.kernel in kernels
    ]


def compile_for(arch: int, tasks: list) -> list[dict]:
    """The reports of bench/machine_code/compiled.py."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.machine_code.compiled", str(arch), "-"],
        cwd=ROOT,
        input="\n".join(map(json.dumps, tasks)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def on_hopper(request) -> list:
    """The tasks of which instructions are counted, at one width unless more is compiled."""
    widths = (64, 128) if request.config.option.kernel_pairs else (64,)
    return counted(instructions.FORMS, widths)


@pytest.fixture(scope="module")
def wanted(request, on_hopper) -> dict[int, list]:
    """The tasks of each architecture, each once."""
    pairs = request.config.option.kernel_pairs
    samples = {arch: compiled_sample.sample(arch, pairs) for arch in ARCHITECTURES}
    samples[90] = list(dict.fromkeys(samples[90] + on_hopper))
    return samples


@pytest.fixture(scope="module")
def reports(wanted) -> dict[int, list[dict]]:
    """Of all architectures; as many compile at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(wanted, pool.map(compile_for, wanted, wanted.values()), strict=True))


@pytest.fixture(params=ARCHITECTURES, ids="sm_{}".format)
def arch(request) -> int:
    return request.param


def task_of(report: dict):
    return compiled.Task(*(report[field] for field in compiled.Task._fields))


@pytest.fixture
def kernels(arch, reports) -> list[dict]:
    return reports[arch]


def test_a_sample_reaches_every_kernel_width_form_and_dtype(arch):
    everything, sample = list(compiled.tasks()), compiled_sample.sample(arch)
    assert {task.kernel for task in sample} == kernels_of_the_package()
    for value in (
        lambda task: (task.kernel, task.head_dim),
        lambda task: task.dtype,
        lambda task: task.bias_gradient,
        lambda task: compiled_sample.bias_and_variant(task.form)[0],
        lambda task: compiled_sample.bias_and_variant(task.form)[1],
    ):
        assert set(map(value, sample)) == set(map(value, everything))


def kernels_of_the_package() -> set[str]:
    package = import_module("biased_flash_attn.triton_kernels")
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = [import_module(module.name) for module in found]
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


def test_every_kernel_compiles(arch, wanted, kernels):
    assert set(map(task_of, kernels)) == set(wanted[arch])


def test_every_kernel_fits_shared_memory(arch, kernels):
    assert [one for one in kernels if one["shared"] > block_bytes(arch)] == []


def test_no_loop_spills_registers(arch, kernels):
    assert [one for one in kernels if one["spills"] > allowed_spills(arch, one)] == []


def may_read_constants_again(arch: int, one: dict) -> bool:
    form, *_ = one["form"].split("-")
    forms = {"relative", "relative_last"} | ({"dense", "normalized"} if arch in (80, 90) else set())
    return form in forms and one["dtype"] != "float32"


def allowed_spills(arch: int, one: dict) -> int:
    if may_read_constants_again(arch, one):
        return SPILLS_OF_FAST_TILES
    if one["form"].startswith("relative"):
        both_terms_of_widest = (one["form"], one["head_dim"]) == ("relative_last", 256)
        return SPILLS_OF_WIDEST_RELATIVE if both_terms_of_widest else SPILLS_OF_RELATIVE
    is_large = (one["kernel"], one["head_dim"]) == (instructions.DKV, 128)
    is_large &= arch not in (90, 100) and one["dtype"] != "float32"
    return SPILLS_OF_LARGE_TILES if is_large else SPILLS[arch]


def test_what_a_loop_computes_stays_in_registers(arch, kernels):
    for one in kernels:
        most = STORES_OF_FAST_TILES if may_read_constants_again(arch, one) else 1
        assert one["stores"] <= most or one["form"].startswith("relative"), one


def test_half_precision_runs_on_matrix_units(arch, kernels):
    """On Hopper those of warp groups, but for decoding, for backward passes of the widest heads and
    for relative biases of two terms or of the widest heads, whose tiles have fewer rows than a warp
    group."""
    half = [one for one in kernels if one["dtype"] != "float32" and one["kernel"] in WITH_PRODUCTS]
    assert half
    for one in half:
        small = one["head_dim"] == 256 and "_bwd_" in one["kernel"]
        small |= one["form"].startswith("relative_last")
        small |= one["form"].startswith("relative") and one["head_dim"] == 256
        small |= one["kernel"] in ("attn_choose_kernel", "attn_decode_kernel")
        assert one["warpgroup" if arch == 90 and not small else "matrix"], one


def test_matrix_units_of_blackwell_have_the_blocks_that_they_take(arch, kernels):
    """Multiples of 8 columns for 64 rows, and of 16 for 128; compilers do not refuse others."""
    blocks = [(one["kernel"], *block) for one in kernels for block in one["blocks"]]
    assert bool(blocks) == (arch == 100)
    assert [(name, rows, columns) for name, rows, columns in blocks if columns % (rows // 8)] == []


def test_registers_of_matrix_products_in_flight_are_not_overwritten(reports):
    """As ptxas of CUDA 12.9 may do. Only Hopper has products that read registers meanwhile."""
    assert any(one["warpgroup"] for one in reports[90])
    assert [one for one in reports[90] if one["overwrites"]] == []


BIASES = ("linear", "cumulative", "cumulative-gain", "distance")
# What they may cost in instructions, as a ratio. Trained, other forms take more. Blocks are chosen
# for time; larger ones would take fewer instructions for a bias.
AIMS = {
    "forward": (1.13, BIASES),
    "backward": (1.10, BIASES),
    "backward, bias trained": (1.09, ("linear", "distance")),
}


@pytest.fixture
def reports_on_hopper(reports, on_hopper) -> list[dict]:
    return [one for one in reports[90] if task_of(one) in on_hopper]


def test_a_bias_costs_few_instructions(reports_on_hopper):
    for (row, width), counts in instructions.instructions(reports_on_hopper).items():
        aim, forms = AIMS.get(row, (None, ()))
        for form in counts.keys() & set(forms):
            assert round(counts[form] / counts["none"], 2) <= aim, (row, width, form)


def test_the_table_of_instructions_is_that_of_the_kernels(reports_on_hopper):
    table = (RESULTS / "instructions-sm_90.md").read_text()
    if f"Triton {reports_on_hopper[0]['triton']} " not in table:
        pytest.skip("another version of Triton compiles to other instructions")
    stated = instructions.read(table)
    for key, row in instructions.cells(reports_on_hopper).items():
        assert row == {title: stated[key][title] for title in row}, key
