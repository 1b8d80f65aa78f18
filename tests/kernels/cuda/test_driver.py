"""Calls of the CUDA driver, and the structures that Python and the kernels share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from biased_flash_attn.cuda_kernels import nvrtc, parameters
from biased_flash_attn.cuda_kernels.variants import CHANNELS, Variant, padded, usual
from biased_flash_attn.shared_memory import block_bytes
from tests.emulator.cuda_driver import EmulatedDriver, InvalidValueError

pytestmark = pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())
HERE = Path(__file__).parent
CXX = os.environ.get("CXX") or shutil.which("c++")

CALLS = """\
init 0
retain 1
current 0xc0
module image
function 0xd0 kernel
attribute 0xf0 8 200000
map type=6 rank=4 address=0x1230 sizes=40,300,4,2 strides=96,28800,549755813888 box=64,128,1,1 \
element_strides=1,1,1,1 options=0,3,2,0
map type=9 rank=4 address=0x1230 sizes=40,300,4,2 strides=96,28800,549755813888 box=64,128,1,1 \
element_strides=1,1,1,1 options=0,3,2,0
current 0xc0
launch 0xf0 grid=1048576,1,1 block=384,1,1 shared=200000 stream=0x57 parameters extra=(nil)
current 0xc0
module image
function 0xd0 missing
the CUDA driver reported CUDA_ERROR_NOT_FOUND
"""


@pytest.mark.skipif(sys.platform != "linux" or not CXX, reason="builds a library of Linux")
def test_the_driver_receives_the_arguments_of_calls(tmp_path):
    library = tmp_path / "libcuda.so.1"
    subprocess.run([CXX, "-shared", "-fPIC", "-o", library, HERE / "libcuda.cpp"], check=True)
    done = subprocess.run(
        [sys.executable, HERE / "driver_calls.py"],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.stdout == CALLS


SIZES, STRIDES, BOX = (64, 300, 4, 2), (128, 38400, 153600), (64, 128, 1, 1)
ADDRESS = 4096


@pytest.mark.parametrize(
    ("what", "address", "sizes", "strides", "box"),
    [
        ("address", ADDRESS + 8, SIZES, STRIDES, BOX),
        ("sizes", ADDRESS, (64, 0, 4, 2), STRIDES, BOX),
        ("sizes", ADDRESS, (64, 2**32 + 1, 4, 2), STRIDES, BOX),
        ("strides", ADDRESS, SIZES, (136, 38400, 153600), BOX),
        ("strides", ADDRESS, SIZES, (0, 38400, 153600), BOX),
        ("strides", ADDRESS, SIZES, (128, 38400, 2**40), BOX),
        ("strides or box of another rank", ADDRESS, SIZES, STRIDES[1:], BOX),
        ("box", ADDRESS, SIZES, STRIDES, (64, 257, 1, 1)),
        ("rows of 256 bytes, swizzled by 128", ADDRESS, SIZES, STRIDES, (128, 128, 1, 1)),
        ("rows of 120 bytes in a box", ADDRESS, SIZES, STRIDES, (60, 128, 1, 1)),
        ("rank 6", ADDRESS, (*SIZES, 1, 1), STRIDES, BOX),
    ],
)
def test_the_emulated_driver_refuses_what_no_tensor_map_can_describe(
    what, address, sizes, strides, box
):
    driver = EmulatedDriver()
    assert len(driver.tensor_map(torch.bfloat16, ADDRESS, SIZES, STRIDES, BOX)) == 128
    with pytest.raises(InvalidValueError, match=f"^{what}"):
        driver.tensor_map(torch.bfloat16, address, sizes, strides, box)


EMPTY = """
struct S { int words[4]; };
template <int N> __global__ void __launch_bounds__(N) empty(const __grid_constant__ S s) {}
"""


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("the module has no function other", {"name": "other"}),
        ("232449 bytes of shared memory", {"permitted": block_bytes(90) + 1}),
        ("grid 0", {"grid": 0}),
        ("block 64; the kernel is compiled for 32 threads", {"block": 64}),
        ("20 bytes of 16 permitted ones", {"shared": 20}),
        ("parameters of 12 bytes, not 16", {"size": 12}),
        ("tensors that are not on cpu", {"device": "meta"}),
    ],
)
def test_the_emulated_driver_refuses_invalid_launches(monkeypatch, what, change):
    monkeypatch.setattr(nvrtc, "texts", lambda: {"empty.cu": EMPTY})
    kernel = nvrtc.compile_kernel("empty.cu", "empty<32>", EmulatedDriver.architecture)

    def launch(name=kernel.name, permitted=16, grid=1, block=32, shared=16, size=16, device="cpu"):
        driver, cpu = EmulatedDriver(), torch.device("cpu")
        function = driver.load(cpu, kernel._replace(name=name), permitted)
        tensors = [torch.zeros(1, device=device)]
        driver.launch(cpu, function, grid, block, shared, bytes(size), tensors)

    launch()
    with pytest.raises(InvalidValueError, match=f"^{what}"):
        launch(**change)


def test_python_mirrors_the_structures_of_the_kernels(monkeypatch):
    """The compiler checks every offset and size."""
    structures = {
        "Rows<float>": parameters.Rows,
        "Plan": parameters.Plan,
        "Problem": parameters.Problem,
        "Bias": parameters.Bias,
        "TensorMap": parameters.TensorMap,
        "ForwardParams": parameters.ForwardParams,
        "DeltaParams": parameters.DeltaParams,
        "BackwardParams": parameters.BackwardParams,
    }
    facts = []
    for name, structure in structures.items():
        facts.append((f"sizeof({name})", len(parameters.encoded(structure()))))
        for field, *_ in structure._fields_:
            offset = getattr(structure, field).offset
            facts.append((f"__builtin_offsetof({name}, {field})", offset))
    checks = [f'static_assert({fact} == {n}, "{fact}");' for fact, n in facts]
    lines = ['#include "params.h"', "using namespace bfa::cuda;", *checks]
    text = "\n".join([*lines, "template <int N> __global__ void mirror() {}"])
    texts = nvrtc.texts() | {"mirror.cu": text}
    monkeypatch.setattr(nvrtc, "texts", lambda: texts)
    nvrtc.compile_kernel("mirror.cu", "mirror<0>", "compute_90a")


def test_every_variant_fits_in_shared_memory():
    assert all(variant.shared_bytes <= block_bytes(90) for variant in usual())


def test_values_of_plans_have_a_variant():
    """The pass that bounds lse has few channels of values."""
    few = {x.head_dim for x in usual() if type(x) is Variant and x.value_dim == padded(8)}
    assert few == set(CHANNELS)
