"""Kernels with CuTe's wgmma and TMA in the emulator, correct and with planted faults."""

from __future__ import annotations

import pytest

from tests.emulator.third_party import cute_matmul
from tests.emulator.third_party.planted import Planted

KERNELS = "matmul_alone", "matmul_cluster"


@pytest.fixture(scope="module")
def module(cuda_ptx):
    return cuda_ptx("cute_matmul.cu")


@pytest.mark.parametrize("name", KERNELS)
def test_product_with_a_ring_of_stages_is_correct(name, module, seed):
    target = cute_matmul.target(module, name)
    assert target.outcomes(target.ptx, seed) == set()


RACES = {"race", "in flight", "uninitialized"}
TOO_EARLY = {"race", "invalid"}  # or an mbarrier has excess arrivals
OF_BOTH = [
    ("a stage counts half of its bytes", RACES, r"(mov\.u32\s+%r\d+, )32768;", r"\g<1>16384;"),
    ("a stage counts too many bytes", {"deadlock"}, r"(mov\.u32\s+%r\d+, )32768;", r"\g<1>49152;"),
    ("a full stage is not waited for", RACES, r"@P1 bra DONE;", "bra DONE;", 1),
    ("an empty stage is not waited for", TOO_EARLY, r"@P1 bra DONE;", "bra DONE;", 0),
    ("a stage is released under a product", {"race"}, r"wgmma\.wait_group\.sync\.aligned\s+1;"),
    (
        "sums are used before they are complete",
        {"in flight"},
        r"wgmma\.wait_group\.sync\.aligned\s+0;",
    ),
    ("stages are never released", {"deadlock"}, r"mbarrier\.arrive\.shared::c[^;]*;"),
    ("no proxy fence before the store", {"race"}, r"fence\.proxy\.async\.shared::cta;"),
    ("the store does not wait for the other warps", RACES, r"bar\.sync\s+%r\d+, %r\d+;"),
    ("another swizzle", {"wrong result"}, "4611686293305360384", "-9223371761976803328"),
    ("tiles are a column apart", {"wrong result"}, r"(add\.s32\s+%r\d+, %r\d+, )64;", r"\g<1>63;"),
]
OF_CLUSTER = [
    ("half of a tile reaches one block only", {"deadlock"}, r"(mov\.u16\s+%rs\d+, )3;", r"\g<1>1;"),
    ("one block's release is enough", TOO_EARLY, r"(mov\.u32\s+%r\d+, )4;", r"\g<1>2;"),
]
FAULTS = [Planted(kernel, *fault) for kernel in KERNELS for fault in OF_BOTH]
FAULTS += [Planted("matmul_cluster", *fault) for fault in OF_CLUSTER]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.target}: {fault.name}")
def test_planted_fault_is_found(fault, module, seed):
    target = cute_matmul.target(module, fault.target)
    assert target.first_fault(fault.edit(target.ptx), seed) in fault.expected
