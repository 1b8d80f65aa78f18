"""The machine code of the CUDA kernels: registers, shared memory, and asynchronous products."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable

import pytest

from biased_flash_attn.cuda_kernels import nvrtc, variants
from biased_flash_attn.cuda_kernels.variants import (
    BackwardAll,
    BackwardKeys,
    BackwardQueries,
    Delta,
    Store,
    Variant,
)
from biased_flash_attn.shared_memory import block_bytes
from tests.support.covering import covering

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing()),
]

# Kernels whose loop over tiles has few or no accesses to values that do not fit in registers.
WITHOUT_SPILLS = (Variant.kernel, BackwardAll.kernel)
# Bytes per thread of values that do not fit in registers: none in other variants.
STACKS = {
    ("attn_bwd_kernel", "Linear", 128, 128, True): 16,
    ("attn_bwd_kernel", "Cumulative", 64, 64, True): 16,
    ("attn_bwd_kernel", "Cumulative", 128, 128, True): 56,
    ("attn_bwd_kernel", "Cumulative", 128, 128, False): 16,
    ("attn_bwd_kernel", "CumulativeWithGain", 64, 64, True): 56,
    ("attn_bwd_kernel", "CumulativeWithGain", 64, 64, False): 24,
    ("attn_bwd_kernel", "CumulativeWithGain", 128, 128, True): 56,
    ("attn_bwd_kernel", "CumulativeWithGain", 128, 128, False): 40,
    ("attn_fwd_kernel", "Distance", 64, 64, False): 16,
    ("attn_fwd_kernel", "Cumulative", 64, 64, False): 48,
    ("attn_fwd_kernel", "CumulativeWithGain", 64, 64, False): 48,
    ("attn_fwd_kernel", "LogSquare", 64, 64, False): 16,
    ("attn_fwd_kernel", "LogSquareWithGain", 64, 64, False): 16,
    ("attn_fwd_kernel", "Relative<16>", 256, 256, False): 80,
    ("attn_fwd_kernel", "Relative<32>", 256, 256, False): 96,
    ("attn_fwd_kernel", "Relative<64>", 256, 256, False): 152,
}
# By the channels of vectors of queries; of 64, the loop of dq and dU has 41 accesses.
LARGEST_STACKS_OF_VECTORS = {16: 32, 32: 56, 64: 128}
# Accesses to them in the loop over tiles of the forward and of the backward kernel, masks included.
ACCESSES_IN_LOOP = {
    ("attn_bwd_kernel", "Linear", 128): 2,
    ("attn_bwd_kernel", "Cumulative", 128): 3,
    ("attn_bwd_kernel", "CumulativeWithGain", 128): 1,
    ("attn_fwd_kernel", "Cumulative", 64): 14,
    ("attn_fwd_kernel", "CumulativeWithGain", 64): 24,
}
SAMPLE = [
    Variant("None", "Float16", 64, 64),
    Variant("Cumulative", "Bfloat16", 64, 64),
    Variant("LogSquareWithGain", "Bfloat16", 128, 128),
    Variant("Distance", "Bfloat16", 256, 256),
    BackwardAll("None", "Float16", 128, 128, False),
    BackwardAll("Linear", "Bfloat16", 128, 128, True),
    BackwardAll("Distance", "Bfloat16", 128, 128, True),
    BackwardAll("CumulativeWithGain", "Float16", 64, 64, True),
    BackwardQueries("None", "Float16", 192, 192, False),
    BackwardQueries("LogSquareWithGain", "Bfloat16", 128, 128, True),
    BackwardQueries("Distance", "Float16", 256, 256, True),
    *BackwardKeys.all_of("Distance", "Bfloat16", 192, 192, False),
    BackwardKeys("Cumulative", "Float16", 128, 128, True),
    BackwardKeys("LogSquareWithGain", "Bfloat16", 128, 128, True),
    *BackwardKeys.all_of("LogSquareWithGain", "Bfloat16", 256, 256, True),
    Variant("Relative<16>", "Bfloat16", 64, 64),
    BackwardQueries("Relative<16>", "Bfloat16", 128, 128, True),
]


def features(variant: Variant) -> set[Hashable]:
    """Every pair of settings."""
    settings = {"kernel": variant.kernel, "trained": getattr(variant, "trained", None)}
    for name in ("form", "element", "head_dim", "value_dim"):
        settings[name] = getattr(variant, name)
    return set(itertools.combinations(settings.items(), 2))


def pytest_generate_tests(metafunc):
    every = [x for x in variants.usual() if not isinstance(x, (Delta, Store))]
    if metafunc.config.option.kernel_pairs:
        chosen = covering(every, features, "variants")
    else:
        others = [x for x in every if x.kernel in WITHOUT_SPILLS and x not in SAMPLE]
        chosen = SAMPLE + [pytest.param(x, marks=pytest.mark.slow) for x in others]
    metafunc.parametrize("variant", chosen, ids=str)


def test_machine_code_fits_and_overlaps_products(variant, tmp_path):
    sass = pytest.importorskip("bench.machine_code.sass", reason="needs Triton's tools")
    paths = pytest.importorskip("bench.estimates.cuda.paths", reason="needs Triton's tools")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compile_for(variant, "sm_90a"))
    usage = sass.tool("cuobjdump", "-res-usage", cubin)
    assembly = sass.tool("nvdisasm", "-c", cubin)
    ptx = compile_for(variant, "compute_90a").decode()

    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    # A block's registers, divided among its threads in multiples of 8.
    of_thread = 65536 // variant.threads // 8 * 8
    assert registers == of_thread
    largest = LARGEST_STACKS_OF_VECTORS.get(variant.rank, 0)
    trained = getattr(variant, "trained", False)
    dims = variant.head_dim, variant.value_dim
    assert stack <= STACKS.get((variant.kernel, variant.form, *dims, trained), largest)
    if variant.kernel in WITHOUT_SPILLS and not variant.rank:
        code = sass.disassemble(cubin.read_bytes())
        begin, last = paths.loop_over_tiles(code)
        in_loop = [one.name for one in code.instructions[begin : last + 1]]
        largest = ACCESSES_IN_LOOP.get((variant.kernel, variant.form, max(dims)), 0)
        assert in_loop.count("LDL") + in_loop.count("STL") <= largest
    assert variant.shared_bytes <= block_bytes(90)

    split = [int(n, 16) for n in re.findall(r"USETMAXREG\S* (?:UP\d, )?(0x\w+)", assembly)]
    assert len(split) == 2
    assert variant.groups * max(split) + min(split) <= (1 + variant.groups) * of_thread
    assert "UTMALDG" in assembly
    # If the compiler serializes products, it waits after each of them.
    assert assembly.count("HGMMA") == ptx.count("wgmma.mma_async") > 0
    assert assembly.count("WARPGROUP.DEPBAR") == ptx.count("wgmma.wait_group")


def compile_for(variant: Variant, architecture: str) -> bytes:
    return nvrtc.compile_kernel(variant.source, variant.expression, architecture).image
