"""Machine code as the estimates read it: control fields, loops, and what an iteration executes."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("triton", reason="needs Triton")

from bench.estimates.iteration import iteration
from bench.machine_code import sass
from bench.machine_code.sass import Instruction
from tests.bench.listing import instruction, listing


def test_control_fields_and_loops_are_read_from_a_listing(seed):
    made = [
        Instruction(
            "FADD",
            "R1, R2, R3",
            random.choice((None, "@P0", "@!PT")),
            stall=random.randrange(16),
            sets=random.randrange(8),
            sets_read=random.randrange(8),
            waits=random.randrange(64),
        )
        for _ in range(12)
    ]
    for at in (6, 9, 11):
        made[at] = instruction("BRA", "")
    labels = {2: ".L_x_1", 4: ".L_x_2", 11: ".L_x_3"}
    branches = {6: ".L_x_2", 9: ".L_x_1", 11: ".L_x_3"}
    code = sass.parse(listing(made, labels, branches))
    bodies = [(loop.begin, loop.end) for loop in code.loops]
    assert bodies == [(2, 10), (4, 7)]  # and not the branch to itself at the end
    for one, read in zip(made, code.instructions, strict=True):
        assert one.opcode == read.opcode
        assert one.predicate == read.predicate
        assert (one.stall, one.sets, one.sets_read, one.waits) == (
            *(read.stall, read.sets, read.sets_read, read.waits),
        )


def code_with(length: int, branches: dict[int, int], **opcodes: int) -> sass.Code:
    """Code whose instructions have their position as operand. opcodes: positions of some names."""
    made = [instruction("FFMA", str(at)) for at in range(length)]
    for name, at in opcodes.items():
        made[at] = instruction(name, str(at))
    for at in branches:
        made[at] = instruction("BRA", str(at))
    loops = sorted(
        (sass.Loop(to, at + 1) for at, to in branches.items() if to < at),
        key=lambda loop: (loop.begin, -loop.end),
    )
    return sass.Code(tuple(made), tuple(loops), tuple(branches.items()))


def test_outer_loops_lie_in_no_other_and_before_the_end():
    # A detour behind the exit branches back into the second loop.
    code = code_with(30, {9: 2, 6: 4, 18: 12, 28: 14}, EXIT=20)
    assert code.outer_loops == (sass.Loop(2, 10), sass.Loop(12, 19))
    assert code.end == 21


def positions(code: sass.Code, form: str) -> list[int]:
    (loop,) = code.outer_loops
    return [int(one.operands) for one in iteration(code, loop, form)]


def test_an_iteration_evaluates_one_more_segment():
    # A loop over segments that is not unrolled, behind a branch that skips it.
    code = code_with(20, {3: 9, 8: 5, 15: 0}, EXIT=19)
    assert positions(code, "normalized") == [*range(16)]


def test_an_iteration_skips_unrolled_copies():
    # Branches skip: all other segments, the unrolled loop, two segments, and the last one.
    code = code_with(30, {2: 16, 4: 9, 8: 5, 10: 13, 13: 16, 25: 0}, EXIT=29)
    assert positions(code, "normalized") == [*range(5), 9, 10, *range(13, 26)]


def test_an_iteration_enters_branches_without_loops():
    code = code_with(20, {2: 12, 5: 9, 15: 0}, EXIT=19)
    assert positions(code, "relative") == [*range(16)]


def test_sums_of_gradients_have_an_iteration_for_each_segment():
    code = code_with(20, {8: 5, 15: 0}, FADD=6, EXIT=19)
    assert positions(code, "normalized") == [*range(9), *range(5, 9), *range(9, 16)]


def test_keys_have_an_iteration_for_each_number_of_their_vectors():
    code = code_with(20, {8: 5, 15: 0}, EXIT=19)
    expected = [*range(5), *[*range(5, 9)] * 64, *range(9, 16)]
    assert positions(code, "relative_last") == expected
