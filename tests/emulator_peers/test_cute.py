"""CuTe's wgmma and TMA, compiled from NVIDIA's headers, in the emulator, and faults in them."""

from __future__ import annotations

import cute_matmul
import pytest
from planted import Planted

KERNELS = "matmul_alone", "matmul_cluster"


@pytest.fixture(scope="module")
def module(cuda_ptx):
    return cuda_ptx("cute_matmul.cu")


@pytest.mark.parametrize("name", KERNELS)
def test_product_with_a_ring_of_stages_is_right(name, module, seed):
    target = cute_matmul.target(module, name)
    assert target.outcomes(target.ptx, seed) == set()


FAULTS: list[Planted] = []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.target}: {fault.name}")
def test_planted_fault_is_found(fault, module, seed):
    target = cute_matmul.target(module, fault.target)
    found = target.outcomes(fault.edit(target.ptx), seed)
    assert found, "not found"
    assert found <= fault.expected
