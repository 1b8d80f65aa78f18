"""Which GPUs the Triton kernels support, and the errors for others."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from biased_flash_attn.shared_memory import block_bytes
from tests.kernels.triton.backend import KERNELS

pytestmark = pytest.mark.skipif(KERNELS is None, reason="needs Triton")

if KERNELS is not None:
    from biased_flash_attn.triton_kernels.processors import Processor

KIB = 1024


@pytest.mark.parametrize(("arch", "most"), [(80, 166912), (86, 101376), (90, 232448)])
def test_shared_memory_is_what_drivers_report(arch, most):
    assert block_bytes(arch) == most


@pytest.mark.parametrize("arch", [80, 86, 87, 89, 90, 100, 103, 110, 120, 121])
def test_every_nvidia_gpu_from_ampere_on_is_supported(arch):
    assert Processor("cuda", arch, block_bytes(arch)).refusal == ""


@pytest.mark.parametrize(
    ("processor", "names"),
    [
        (("cuda", 70, 96 * KIB), "sm_70"),
        (("cuda", 75, 64 * KIB), "sm_75"),
        (("hip", "gfx942", 64 * KIB), "gfx942"),
        (("cuda", 89, 48 * KIB), "sm_89"),
        (("cuda", 90, 99 * KIB), "sm_90"),
    ],
)
def test_refusals_name_the_gpu_and_the_alternatives(processor, names):
    refusal = Processor(*processor).refusal
    assert names in refusal
    assert "backend='reference'" in refusal
    assert "backend='cpu'" in refusal


def test_processors_that_compile_alike_share_a_family():
    families = [
        {Processor("cuda", arch, 0).family for arch in archs}
        for archs in ((80, 87), (86, 89), (90,), (100, 103, 110), (120, 121))
    ]
    assert [len(family) for family in families] == [1] * 5
    assert len(set.union(*families)) == 5


# torch is patched to pretend that there are GPUs, which needs a separate process.
QUERY_DRIVER = """
import contextlib, types
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from biased_flash_attn import backends
from biased_flash_attn.forms import Geometry, NoBias
from biased_flash_attn.problem import Problem

class Driver:
    def __init__(self, target, shared_memory):
        properties = {"max_shared_mem": shared_memory}
        self.get_current_target = lambda: target
        self.get_current_device = lambda: shared_memory
        self.utils = types.SimpleNamespace(get_device_properties=lambda device: properties)

torch.cuda.device = lambda device: contextlib.nullcontext()  # there is none to switch to
with FakeTensorMode():
    q = torch.empty(1, 1, 16, 16, device="cuda")
problem = Problem(q, q, q, NoBias(), Geometry(16, 16), 1.0, 0.0, "")
for target, shared_memory in [
    (GPUTarget("cuda", 75, 32), 65536),
    (GPUTarget("hip", "gfx942", 64), 65536),
    (GPUTarget("cuda", 86, 32), 49152),
    (GPUTarget("cuda", 86, 32), 101376),
]:
    driver.set_active(Driver(target, shared_memory))
    try:
        print(backends.choose("triton", problem))
    except ValueError as error:
        print(error)
"""


def test_explicit_backend_checks_the_reported_gpu():
    """Takes three seconds, because another process imports torch."""
    run = subprocess.run(
        [sys.executable, "-c", QUERY_DRIVER], capture_output=True, text=True, check=True
    )
    turing, cdna, little, enough = run.stdout.splitlines()
    assert "backend='triton' needs an NVIDIA GPU of sm_80 or newer; this one is sm_75" in turing
    assert "backend='triton' needs an NVIDIA GPU; this one is gfx942" in cdna
    assert "99 KiB of shared memory per block; this GPU, sm_86, has 48" in little
    assert enough == "triton"


def test_the_interpreter_is_refused(monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", True)
    assert "unset TRITON_INTERPRET" in KERNELS.unsupported(torch.device("cuda"))
