"""What the compiler makes of the Triton kernels for processors that need not be here."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import instructions

pytest.importorskip("triton", reason="needs Triton")

BENCH = Path(__file__).parents[1] / "bench"
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
VARIANTS = list(itertools.product(SHARED_MEMORY, (64, 128, 256)))
FORMS = ("none", "linear", "distance", "cumulative", "cumulative-gain", "log1p_square-gain")
WITH_PRODUCTS = (
    "attn_fwd_kernel",
    "attn_bwd_dq_kernel",
    "attn_bwd_dkv_kernel",
    "attn_bwd_table_kernel",
    "attn_trim_kernel",
    "attn_choose_kernel",
    "attn_decode_kernel",
)
ATTENTION = (*WITH_PRODUCTS, "attn_append_kernel")
# Each makes other kernels of a causal problem.
CHANGES = ("noncausal", "window", "plan", "packed", "packed-plan", "strided", "far")
# Kernels that are not started without a bias, or for other forms.
OF_BIASES = {
    "attn_bwd_table_kernel": ["distance"],
    "attn_trim_kernel": FORMS[1:],
    "attn_choose_kernel": FORMS[1:],
}


def compiled(arch: int, head_dim: int) -> list[dict]:
    """The kernels that compiled.py lists, for an architecture and one width of a head."""
    done = subprocess.run(
        [sys.executable, BENCH / "compiled.py", str(arch), str(head_dim)],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def reports():
    """All variants; as many compile at a time as there are cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(VARIANTS, pool.map(lambda v: compiled(*v), VARIANTS), strict=True))


@pytest.fixture(params=VARIANTS, ids=lambda variant: "sm_{}-d{}".format(*variant))
def variant(request, reports):
    return request.param[0], reports[request.param]


def test_every_kernel_of_every_form_compiles(variant):
    _, kernels = variant
    made = {(one["kernel"], one["form"], one["dtype"]) for one in kernels}
    for kernel, dtype in itertools.product(ATTENTION, ("bfloat16", "float32")):
        for form in OF_BIASES.get(kernel, FORMS):
            assert (kernel, form, dtype) in made
    for kernel, form in itertools.product(WITH_PRODUCTS[:3], ("linear", "cumulative-gain")):
        assert (kernel, form, "float16") in made
        for changed in CHANGES:
            assert (kernel, f"{form}-{changed}", "bfloat16") in made


def test_every_kernel_fits_shared_memory(variant):
    arch, kernels = variant
    assert [one for one in kernels if one["shared"] > SHARED_MEMORY[arch]] == []


def test_no_loop_spills_registers(variant):
    _, kernels = variant
    assert [one for one in kernels if one["spills"]] == []


def test_half_precision_runs_on_matrix_units(variant):
    """On Hopper those of warp groups, but for backward passes of the widest heads and for decoding,
    whose tiles have fewer rows than a warp group."""
    arch, kernels = variant
    half = [one for one in kernels if one["dtype"] != "float32" and one["kernel"] in WITH_PRODUCTS]
    assert half
    for one in half:
        small = one["head_dim"] == 256 and "_bwd_" in one["kernel"]
        small |= one["kernel"] in ("attn_choose_kernel", "attn_decode_kernel")
        assert one["warpgroup" if arch == 90 and not small else "matrix"], one


def test_matrix_units_of_blackwell_have_the_blocks_that_they_take(variant):
    """Multiples of 8 columns for 64 rows, and of 16 for 128; compilers do not refuse others."""
    arch, kernels = variant
    blocks = [(one["kernel"], *block) for one in kernels for block in one["blocks"]]
    assert bool(blocks) == (arch == 100)
    assert [(name, rows, columns) for name, rows, columns in blocks if columns % (rows // 8)] == []


BIASES = ("linear", "cumulative", "cumulative-gain", "distance")
# What they may cost in instructions, as a ratio. Trained, other forms take more.
AIMS = {
    "forward": (1.06, BIASES),
    "backward": (1.05, BIASES),
    "backward, bias trained": (1.05, ("linear", "distance")),
}


@pytest.fixture
def on_hopper(reports) -> list[dict]:
    return reports[90, 64] + reports[90, 128]


def test_a_bias_costs_few_instructions(on_hopper):
    counts = instructions.instructions(on_hopper)
    for (row, (aim, forms)), width in itertools.product(AIMS.items(), (64, 128)):
        for form in forms:
            ratio = counts[row, width][form] / counts[row, width]["none"]
            assert round(ratio, 2) <= aim, (row, width, form)


def test_the_table_of_instructions_is_that_of_the_kernels(on_hopper):
    table = (BENCH / "results" / "instructions-sm_90.md").read_text()
    if f"Triton {on_hopper[0]['triton']} " not in table:
        pytest.skip("another version of Triton compiles to other instructions")
    assert instructions.document(on_hopper) == table
