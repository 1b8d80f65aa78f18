"""Registers that are overwritten while a matrix product of a warp group uses them."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs Triton")

from bench import ROOT
from bench.machine_code import hazards, sass
from tests.bench.listing import instruction, listing

END = instruction("EXIT")


def product(left: int | None = None, accumulators: int = 24, ends_group: bool = True):
    """64 columns, and so 32 accumulators of each thread."""
    operand = "gdesc[UR4]" if left is None else f"R{left}"
    operands = f"R{accumulators}, {operand}, gdesc[UR8], R{accumulators}"
    return instruction("HGMMA.64x64x16.F32.BF16", operands + ", gsb0" * ends_group)


def wait(allowed: int = 0):
    return instruction("WARPGROUP.DEPBAR.LE", f"gsb0, 0x{allowed:x}")


def write(register: int):
    return instruction("FADD", f"R{register}, R1, R2")


def overwrites(*instructions, labels=None, branches=None) -> list[str]:
    """The operands of the instructions that are found."""
    code = sass.parse(listing([*instructions, END], labels or {}, branches or {}))
    return [one.operands for one in hazards.overwrites(code)]


@pytest.mark.parametrize(
    ("opcode", "operands", "predicate"),
    [
        ("FADD", "R152, R1, R2", None),
        ("FADD", "R155, R1, R2", "@!P3"),
        ("FMUL", "R24, R24, R2", None),  # an accumulator
        ("FMUL", "R55, R55, R2", None),
        ("IADD3", "R153, P4, R1, R2, RZ", None),
        ("SHFL.BFLY", "PT, R154, R1, 0x2, 0x1f", None),
        ("IMAD.WIDE", "R151, R1, 0x2, R2", None),
        ("DADD", "R151, R2, R4", None),
        ("F2F.F64.F32", "R151, R2", None),
        ("CS2R", "R151, SRZ", None),
        ("LDG.E.64", "R151, desc[UR4][R2.64]", None),
        ("LDS.128", "R149, [R2]", None),
        ("LDSM.16.M88.4", "R149, [R2]", None),
        ("HMMA.16816.F32.BF16", "R149, R4, R8, RZ", None),
        ("CALL.REL.NOINC", "R1", None),
    ],
)
def test_a_register_may_be_written_only_after_the_wait(opcode, operands, predicate):
    one = instruction(opcode, operands, predicate)
    assert overwrites(product(152), one, wait()) == [operands]
    assert overwrites(product(152), wait(), one) == []


@pytest.mark.parametrize(
    ("opcode", "operands", "predicate"),
    [
        ("FADD", "R151, R152, R24", None),
        ("FADD", "R156, R152, R24", None),
        ("FADD", "R56, R1, R2", None),
        ("FADD", "R152, R1, R2", "@!PT"),
        ("LDS", "R151, [R152]", None),
        ("LDG.E.128", "R148, desc[UR4][R2.64]", None),
        ("STS.128", "[R2], R152", None),
        ("ISETP.GE.AND", "P0, PT, R152, RZ, PT", None),
        ("R2UR", "UR4, R152", None),
        ("SHF.L.U64.HI", "R151, R1, 0x2, R2", None),
        ("CS2R.32", "R151, SR_CLOCKLO", None),
        ("HMMA.16816.F16", "R150, R4, R8, RZ", None),
    ],
)
def test_reads_and_other_registers_are_permitted(opcode, operands, predicate):
    assert overwrites(product(152), instruction(opcode, operands, predicate), wait()) == []


def test_left_operands_in_shared_memory_have_no_registers():
    assert overwrites(product(), write(152), wait()) == []


def test_a_wait_permits_the_newest_groups_to_be_pending(seed):
    """Of up to 12 groups, more than a wait can allow."""
    count = random.randrange(2, 13)
    allowed = random.randrange(min(count, 8))
    left = [152 + 4 * n for n in range(count)]
    writes = [write(register) for register in left]
    found = overwrites(*map(product, left), wait(allowed), *writes)
    assert found == [one.operands for one in writes[count - allowed :]]


def test_any_number_of_groups_may_be_in_flight():
    left = range(152, 200, 4)
    assert overwrites(*map(product, left), *map(write, left)) == [f"R{x}, R1, R2" for x in left]


def test_products_belong_to_the_group_that_is_ended_after_them():
    whole = product(152, ends_group=False), product(160)
    assert overwrites(*whole, wait(), write(152), write(160)) == []
    part = product(152), product(160, ends_group=False)
    assert overwrites(*part, wait(), write(152), write(160)) == ["R160, R1, R2"]


def test_products_in_flight_at_the_end_of_a_loop_are_found_at_its_beginning():
    back = instruction("BRA", "P0,")
    for body, expected in (
        ([write(152), wait(), product(152), back], ["R152, R1, R2"]),
        ([wait(), write(152), product(152), back], []),
    ):
        assert overwrites(*body, labels={0: ".L_x_0"}, branches={3: ".L_x_0"}) == expected


def test_a_wait_must_be_on_both_paths():
    skip = instruction("BRA", "", "@P0")
    for body, expected in (
        ([product(152), skip, wait(), write(152)], ["R152, R1, R2"]),
        ([product(152), wait(), skip, write(152)], []),
    ):
        at = body.index(skip)
        found = overwrites(*body, labels={3: ".L_x_0"}, branches={at: ".L_x_0"})
        assert found == expected


def test_both_paths_of_a_condition_are_followed():
    for leave in (instruction("EXIT", "", "@P0"), instruction("BRA", "", "@P0")):
        branches = {1: ".L_x_0"} if leave.name == "BRA" else {}
        body = [product(152), leave, write(152), wait()]
        assert overwrites(*body, labels={3: ".L_x_0"}, branches=branches) == ["R152, R1, R2"]


def test_convergence_barriers_are_not_branches():
    body = [product(152), instruction("BSSY", "B0,"), wait(), write(152)]
    assert overwrites(*body, labels={3: ".L_x_0"}, branches={1: ".L_x_0"}) == []


def test_products_may_share_accumulators_but_not_overwrite_operands():
    assert overwrites(product(152), product(156), wait()) == []
    second = product(156, accumulators=124)  # up to R155
    assert overwrites(product(152), second, wait()) == [second.operands]
    assert overwrites(product(152), wait(), second) == []


# Compiles in another process, which replaces Triton's driver.
COMPILE = """
import dataclasses, json
from bench.estimates.kernels import build
from bench.machine_code import hazards
code = build(90, "attn_fwd_kernel", "none", 64).code
never = [
    dataclasses.replace(one, predicate="@!PT" if one.name == "WARPGROUP" else one.predicate)
    for one in code.instructions
]
for each in code, dataclasses.replace(code, instructions=tuple(never)):
    print(json.dumps([one.operands for one in hazards.overwrites(each)]))
"""


@pytest.mark.slow
def test_a_compiled_kernel_needs_its_waits():
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shipped, without_waits = map(json.loads, done.stdout.splitlines())
    assert shipped == []
    assert len(without_waits) > 10
