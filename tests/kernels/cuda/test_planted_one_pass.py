"""Faults planted in the backward kernel that computes all gradients in one pass, which the emulator
must find."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from tests.kernels.cuda.backend import EMULATED, MARKS, check
from tests.kernels.cuda.planted import EARLY, OUT_OF_STEP, SETTINGS, WRONG, Planted
from tests.sequences.packed_cases import PackedCase, drawn_packed, packed
from tests.support.cases import Case
from tests.support.problems import drawn

pytestmark = [*MARKS, pytest.mark.skipif(not EMULATED, reason="faults may hang a GPU")]

KERNEL, TURNS = "backward.cu", "query_sums.cuh"
PRODUCERS = "backward_producers.cuh"
STORE = "backward_store.cu"
BEYOND = {"race", "out of bounds", WRONG}  # rows or channels of others, or none
SHARED = {"race", "deadlock", WRONG}  # sums

# With tiles of queries to which the first block of keys does not add.
ADDED = Case(
    "linear",
    torch.float16,
    (300, 300),
    batch=1,
    window=100,
    **SETTINGS | {"causal": True, "trained": True, "heads": (2, 2)},
)
OF_TURNS = [
    Planted(
        "turns are not waited for", {"race"}, TURNS, "(now = load_acquire(turns)) != turn", "false"
    ),
    Planted("another turn is waited for", SHARED | {"trap"}, TURNS, "!= turn)", "!= turn - 1)"),
    Planted(
        "a turn is skipped", {"deadlock", "trap"}, TURNS, "(turns, turn + 1)", "(turns, turn + 2)"
    ),
    Planted("turns are never passed", {"deadlock"}, TURNS, "store_release(turns, turn + 1);"),
    Planted("turns are passed before sums are written", {"race"}, TURNS, "wait_until_written();"),
    Planted(
        "turns are passed without the sums",
        {"race"},
        TURNS,
        "store_release(turns, turn + 1);",
        "*turns = turn + 1;",
    ),
    Planted("turns are passed in any order", {"race"}, "ptx.cuh", "st.release", "st.relaxed"),
    Planted("turns are seen without the sums", {"race"}, "ptx.cuh", "ld.acquire", "ld.relaxed"),
    Planted(
        "blocks take keys by their index",
        {"deadlock"},
        KERNEL,
        "atomicAdd(params.tickets, 1)",
        "int(blockIdx.x)",
    ),
    Planted(
        "blocks may take the same keys",
        {"race"},
        KERNEL,
        "atomicAdd(params.tickets, 1)",
        "(*params.tickets)++",
    ),
    Planted("only the first keys come first", {"deadlock"}, TURNS, "|| !earlier.contains(i)"),
    Planted(
        "all keys come first",
        {"race", WRONG},
        TURNS,
        "block.first == 0 || !earlier.contains(i)",
        "true",
    ),
    Planted("sums replace those of earlier keys", {WRONG}, TURNS, "add_floats(", "store_bytes("),
    Planted("the first sums are added", {WRONG}, TURNS, "store_bytes(", "add_floats("),
    Planted("heads share sums", SHARED, TURNS, ".heads + head.h;", ".heads;"),
    Planted("tiles share sums", SHARED, TURNS, "of_sequence + i / kTileQueries", "of_sequence"),
    Planted("copies are not committed", EARLY, TURNS, "commit_copies();"),
    Planted("sums are released before they are read", EARLY, TURNS, "wait_until_read();"),
    Planted(
        "sums are added before they are complete",
        OUT_OF_STEP,
        TURNS,
        "ring_.wait_until_full(stage_);",
    ),
    Planted("sums are never released", {"deadlock"}, TURNS, "ring_.release(stage_);"),
    # Where other warps read dS too, it has two stages, like tiles, which are waited for.
    Planted(
        "dS is replaced before it is read",
        OUT_OF_STEP,
        KERNEL,
        "shared_.grad_s_ring.wait_until_empty(GradStage::of(tile_));",
    ),
]

# With more tiles than stages.
PIPELINE = replace(ADDED, bias="cumulative-gain", dtype=torch.bfloat16, window=None, heads=(1, 1))
OF_PIPELINE = [
    Planted(
        "barriers and ranks are read before they are set",
        OUT_OF_STEP,
        KERNEL,
        "__syncthreads();",
    ),
    Planted("own rows are not waited for", EARLY, KERNEL, "shared_.own_full.wait(0);"),
    Planted("queries are full without lse and D", OUT_OF_STEP, KERNEL, "init(true,", "init(false,"),
    Planted(
        "a stage is empty before its numbers are read",
        OUT_OF_STEP,
        KERNEL,
        "init(true, kConsumerWarps + Trained::kSummers)",
        "init(true, kConsumerWarps)",
    ),
    Planted(
        "dS is complete when one group has stored it",
        OUT_OF_STEP,
        KERNEL,
        "grad_s_ring.init(kConsumerWarps,",
        "grad_s_ring.init(kConsumerWarps / 2,",
    ),
    Planted(
        "dS is replaced before it is summed",
        OUT_OF_STEP,
        KERNEL,
        "grad_s_ring.init(kConsumerWarps, kConsumerWarps + Trained::kSummers)",
        "grad_s_ring.init(kConsumerWarps, kConsumerWarps)",
    ),
    Planted(
        "sums are complete without those of dS",
        OUT_OF_STEP,
        KERNEL,
        "sums_ring.init(kConsumerWarps + (Trained::kSums ? 1 : 0), 1)",
        "sums_ring.init(kConsumerWarps, 1)",
    ),
    *[
        Planted(f"{what} not waited for", OUT_OF_STEP, source, f"{wait};")
        for what, source, wait in [
            ("queries are", KERNEL, "shared_.ring.wait_until_full(stage)"),
            ("dS is", KERNEL, "shared_.grad_s_ring.wait_until_full(GradStage::of(tile_))"),
            ("dS of sums is", PRODUCERS, "shared.grad_s_ring.wait_until_full(grad_s_stage)"),
            ("copied dq is", KERNEL, "shared_.sums_ring.wait_until_empty(Stage<1>::of(tile_))"),
            ("copied sums are", PRODUCERS, "shared.sums_ring.wait_until_empty(sums_stage)"),
        ]
    ],
    Planted(
        "keys are replaced before they are read",
        EARLY,
        KERNEL,
        "shared_.grad_s_ring.wait_until_empty(GradStage::of(tile_ + n));",
        ";",
    ),
    *[
        Planted(what, {"deadlock"}, source, f"{call};", ";")
        for what, source, call in [
            ("queries are never full", PRODUCERS, "shared.ring.full(stage).arrive()"),
            ("queries are never released", KERNEL, "shared_.ring.release(stage)"),
            ("queries of sums are never released", PRODUCERS, "shared.ring.release(stage)"),
            ("dS is never full", KERNEL, "shared_.grad_s_ring.full(GradStage::of(tile_)).arrive()"),
            ("dS is never released", KERNEL, "shared_.grad_s_ring.release(GradStage::of(tile_))"),
            ("dS of sums is never released", PRODUCERS, "shared.grad_s_ring.release(grad_s_stage)"),
            ("dq is never full", KERNEL, "shared_.sums_ring.full(Stage<1>::of(tile_)).arrive()"),
            ("sums are never full", PRODUCERS, "shared.sums_ring.full(sums_stage).arrive()"),
        ]
    ],
    *[
        Planted(
            f"the copy precedes {what}",
            EARLY,
            source,
            f"fence_async_proxy();\n{indent}__syncwarp();\n{indent}if ({leader}) {ring}.full",
            f"__syncwarp();\n{indent}if ({leader}) {ring}.full",
        )
        for what, source, indent, leader, ring in [
            ("dS", KERNEL, 8 * " ", "leads_warp_", "shared_.grad_s_ring"),
            ("dq", KERNEL, 8 * " ", "leads_warp_", "shared_.sums_ring"),
            ("sums", PRODUCERS, 30 * " ", "lane == 0", "shared.sums_ring"),
        ]
    ],
    *[
        Planted(f"{what} before its product is complete", EARLY, KERNEL, call, f" + 1{call}")
        for what, call in {
            "s is read": ">(s);",
            "dP is read": ">(grad_s);",
            "dq is stored": ">(dq,",
            "dk is left": ">(dk,",
        }.items()
    ],
    Planted(
        "later queries get a gradient of keys", {WRONG}, "key_logits.cuh", "s[n] = -kInfinity;", ";"
    ),
]
OF_SEQUENCES = [
    Planted(
        "sequences share sums",
        SHARED,
        TURNS,
        "(params.problem.packed ? head.b : 0)",
        "0",
    ),
    Planted(
        "sequences have the tiles of the first",
        SHARED,
        TURNS,
        "head.first_query / kTileQueries +",
    ),
]

BOTH_SIDES = replace(ADDED, lengths=(200, 200), heads=(1, 1), window=None, causal=False)
OF_SIDES = [
    Planted(name, {WRONG}, "forms/linear.cuh", "first ? -1 : 0", f"first ? {new}")
    for name, new in [
        ("keys among queries precede them", "-1 : 1"),
        ("keys after queries precede them", "1 : 0"),
    ]
]

ALL = replace(PIPELINE, bias="cumulative")
# Whose second groups have 8 channels of dq.
FEW_CHANNELS = replace(ALL, dims=(40, 40))
OF_RESULTS = [
    (case, Planted(name, expected, source, old, new))
    for case, name, expected, source, old, new in [
        (
            replace(ALL, lengths=(300, 100)),
            "sums of no keys are read",
            {WRONG},
            STORE,
            "params.turns[number] > 0",
            "true",
        ),
        (ALL, "dq has no scale", {WRONG}, STORE, "multiply(dq, scale);", ""),
        (ALL, "groups store the same channels", BEYOND, STORE, "group * kHeadDim / 2", "0"),
        (
            FEW_CHANNELS,
            "other channels are stored",
            BEYOND,
            STORE,
            "params.head_dim - channel",
            "params.head_dim",
        ),
        (ALL, "other rows are stored", BEYOND, STORE, "first, count,", "first, kTileQueries,"),
        (
            ALL,
            "gradients of other queries are stored",
            BEYOND,
            STORE,
            "minimum(kTileQueries, count)",
            "kTileQueries",
        ),
        (ALL, "groups multiply the same channels", {WRONG}, KERNEL, "place_.group * kColumns", "0"),
    ]
]


@pytest.mark.parametrize("planted", OF_TURNS, ids=lambda x: x.name)
def test_fault_of_turns_is_found(planted, first_fault):
    problem = drawn(ADDED)
    assert first_fault(planted, lambda: check(problem)) in planted.expected


@pytest.mark.parametrize("planted", OF_PIPELINE, ids=lambda x: x.name)
def test_fault_of_the_pipeline_is_found(planted, first_fault):
    problem = drawn(PIPELINE)
    assert first_fault(planted, lambda: check(problem)) in planted.expected


@pytest.mark.parametrize("planted", OF_SIDES, ids=lambda x: x.name)
def test_fault_of_sides_is_found(planted, first_fault):
    problem = drawn(BOTH_SIDES)
    assert first_fault(planted, lambda: check(problem)) in planted.expected


@pytest.mark.parametrize(("case", "planted"), OF_RESULTS, ids=lambda x: getattr(x, "name", None))
def test_fault_of_results_is_found(case, planted, first_fault):
    problem = drawn(case)
    assert first_fault(planted, lambda: check(problem)) in planted.expected


@pytest.fixture
def sequences_are_exact():
    """Returns a function that checks packed sequences, which share no tile of queries."""
    lengths = ((150, 140), (20, 160), (100, 100))
    settings = SETTINGS | {"causal": True, "trained": True, "heads": (2, 1)}
    problem = drawn_packed(PackedCase.of(lengths, bias="linear", dtype=torch.float16, **settings))
    return lambda: check(problem, functools.partial(packed, backend="cuda"))


def test_packed_sequences_are_exact(sequences_are_exact):
    sequences_are_exact()


@pytest.mark.parametrize("planted", OF_SEQUENCES, ids=lambda x: x.name)
def test_fault_of_sequences_is_found(planted, first_fault, sequences_are_exact):
    assert first_fault(planted, sequences_are_exact) in planted.expected
