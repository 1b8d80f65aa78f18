"""Faults planted in the kernels' pipeline, which the emulator must find."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.cuda.backend import EMULATED, MARKS, attend, check
from tests.kernels.cuda.planted import EARLY, OUT_OF_STEP, SETTINGS, WRONG, Planted
from tests.sequences.packed_cases import PaddedCase, drawn_padded, padded
from tests.support.cases import Case
from tests.support.problems import drawn, naive

pytestmark = [*MARKS, pytest.mark.skipif(not EMULATED, reason="faults may hang a GPU")]

WAIT_FULL = "full_[stage.index].wait(stage.parity);"
WAIT_EMPTY = "empty_[stage.index].wait(stage.parity ^ 1);"
RELEASE_KEYS = "if (leads_warp_) shared_.key_ring.release(stage_);"
CUMULATIVE = "forms/cumulative.cuh"
START = "logits.start(s, shared_.numbers[stage_.index], tiles.first_key(n));"
BETWEEN = """
        };
        const auto add_to_softmax = [&](int n) {
            logits.complete(s, shared_.numbers[stage_.index], tiles.first_key(n));
            __syncwarp();
            """

# With more tiles than stages, more blocks of queries than run at a time, and a form that stages
# numbers of each tile.
OF_TILES = [
    Planted("full stages are not waited for", OUT_OF_STEP, "pipeline.cuh", WAIT_FULL),
    Planted(
        "empty stages are not waited for",
        OUT_OF_STEP,
        "pipeline.cuh",
        WAIT_EMPTY,
    ),
    Planted("the first phase is not over", {"deadlock"}, "pipeline.cuh", "parity ^ 1", "parity"),
    Planted(
        "parities never change",
        OUT_OF_STEP,
        "pipeline.cuh",
        "parity ^= index == 0;",
    ),
    Planted(
        "consumers claim registers that the producer keeps",
        {"deadlock"},
        "tiles.cuh",
        "40 : 32",
        "40 : 40",
    ),
    Planted(
        "queries are not waited for", OUT_OF_STEP, "pipeline.cuh", "ring_.wait_until_full(round);"
    ),
    Planted(
        "queries are replaced before their outputs are stored",
        OUT_OF_STEP,
        "pipeline.cuh",
        "ring_.wait_until_empty(round);",
    ),
    Planted(
        "queries are replaced when one warp has stored its outputs",
        OUT_OF_STEP,
        "forward.cu",
        "group.init(kGroupThreads / 32);",
        "group.init(1);",
    ),
    Planted(
        "queries precede the outputs in their place",
        EARLY,
        "forward.cu",
        "fence_async_proxy();\n        });",
        "});",
    ),
    Planted(
        "queries of other rows are copied",
        {WRONG},
        "forward.cu",
        "head.first_query + block.first + first, head.h",
        "head.first_query + block.first, head.h",
    ),
    Planted(
        "blocks may take the same ticket",
        {"race"},
        "forward.cu",
        "atomicAdd(params_.tickets, 1)",
        "(*params_.tickets)++",
    ),
    Planted(
        "the first ticket is lost",
        {WRONG},
        "forward.cu",
        "int(gridDim.x) +",
        "1 + int(gridDim.x) +",
    ),
    Planted(
        "the end of the work is not sent",
        {"deadlock"},
        "forward.cu",
        "group.send(Mailbox::kNoMore, round_);",
        ";",
    ),
    *[
        Planted(
            f"{name} are full with half of the bytes",
            OUT_OF_STEP,
            "forward.cu",
            f"sizeof({name})",
            f"sizeof({name}) / 2",
        )
        for name in ("keys", "values")
    ],
    Planted(
        "the first turn is not given",
        {"deadlock"},
        "pipeline.cuh",
        "if (group_ == kGroups - 1) pass();",
    ),
    Planted(
        "logits are used before they are complete",
        EARLY,
        "forward.cu",
        "wait_products<1>(s);",
    ),
    Planted(
        "outputs are rescaled before they are complete",
        EARLY,
        "forward.cu",
        "wait_products<0>(o, p);\n                if (leads_warp_)",
        "if (leads_warp_)",
    ),
    Planted(
        "keys are released before they are multiplied",
        EARLY,
        "forward.cu",
        f"{START}{BETWEEN}{RELEASE_KEYS}",
        f"{{ {START} __syncwarp(); {RELEASE_KEYS} }}{BETWEEN}",
    ),
    Planted(
        "keys are released before the form's numbers are read",
        EARLY,
        "forward.cu",
        f"{START}{BETWEEN}{RELEASE_KEYS}",
        f"{{ {RELEASE_KEYS} {START} }}{BETWEEN}",
    ),
    Planted(
        "a stage is empty when half of the warps have released it",
        OUT_OF_STEP,
        "forward.cu",
        "key_ring.init(has_numbers ? 2 : 1, kWarps);",
        "key_ring.init(has_numbers ? 2 : 1, kWarps / 2);",
    ),
    Planted(
        "keys are full without the form's numbers",
        OUT_OF_STEP,
        "forward.cu",
        "has_numbers ? 2 : 1",
        "1",
    ),
    Planted(
        "values are never released",
        {"deadlock"},
        "forward.cu",
        "if (leads_warp_) shared_.value_ring.release(previous);",
    ),
    Planted("turns are never passed", {"deadlock"}, "forward.cu", "turns_.pass();"),
    Planted(
        "outputs are read before all lanes have written them", EARLY, "output.cuh", "__syncwarp();"
    ),
]
# With tiles of keys before and after all queries of a block.
OF_SUMS = [
    Planted(
        "large sums of steps are rounded",
        {WRONG},
        CUMULATIVE,
        "if (__any_sync(~0u, is_large)) side = 0;",
    ),
    Planted(
        "sums of keys after the queries have the sign of others",
        {WRONG},
        CUMULATIVE,
        "kLog2E * unit * side * query.gain",
        "kLog2E * unit * query.gain",
    ),
]
OF_PADDING = [
    Planted(
        "rows of others are cleared before they arrive",
        EARLY,
        "forward.cu",
        "shared_.own_values.wait(parity_);",
    ),
    Planted(
        "products precede the cleared rows",
        EARLY,
        "forward.cu",
        "fence_async_proxy();\n        __syncwarp();",
        "__syncwarp();",
    ),
    Planted("the phase of cleared rows never changes", OUT_OF_STEP, "forward.cu", "parity_ ^= 1;"),
    Planted(
        "rows of others are not cleared",
        {WRONG},
        "forward.cu",
        "clear_rows(values, head.n_key - j, lane_);",
    ),
]

OF_PADDING += [
    Planted(
        "other rows are cleared too early",
        OUT_OF_STEP,
        "backward_tiles.cuh",
        "shared_.uncleared.wait(parity_);",
    ),
    Planted(
        "products precede the cleared rows", EARLY, "backward_tiles.cuh", "fence_async_proxy();"
    ),
    Planted("the phase never changes", OUT_OF_STEP, "backward_tiles.cuh", "parity_ ^= 1;"),
    *[
        Planted(
            f"other rows of {x} are not cleared",
            {WRONG},
            "backward_tiles.cuh",
            f"clear_rows(to_{x},",
            f"if (false) clear_rows(to_{x},",
        )
        for x in ("channels", "values")
    ],
    Planted(
        "keys of others are not cleared",
        {WRONG},
        "backward_producers.cuh",
        "head.entry, keys.count(),",
        "head.entry, kBlockRows,",
    ),
    Planted(
        "queries of others are not cleared",
        {WRONG},
        "backward_producers.cuh",
        "head.n_query - i, sequences",
        "kBlockRows, sequences",
    ),
]


@pytest.mark.parametrize("planted", OF_TILES, ids=lambda x: x.name)
def test_fault_of_the_pipeline_is_found(planted, first_fault):
    settings = SETTINGS | {"heads": (2, 1)}
    problem = drawn(Case("cumulative", torch.bfloat16, (250, 500), batch=1, **settings))
    assert first_fault(planted, lambda: check(problem)) in planted.expected


@pytest.fixture
def lse_is_exact():
    """Returns a function that checks lse where keys between two large steps have no weight."""
    problem = drawn(Case("cumulative", torch.bfloat16, (400, 400), batch=1, **SETTINGS))
    with torch.no_grad():
        problem.bias.steps[..., 100], problem.bias.steps[..., 130] = 1e7, -1e7
    _, truth = naive(problem.double())

    def is_exact() -> None:
        _, lse = attend(problem)
        assert (lse - truth)[..., 130:].abs().max() <= 1e-5

    return is_exact


def test_large_steps_in_tiles_on_one_side_are_exact(lse_is_exact):
    lse_is_exact()


@pytest.mark.parametrize("planted", OF_SUMS, ids=lambda x: x.name)
def test_fault_of_sums_of_steps_is_found(planted, first_fault, lse_is_exact):
    assert first_fault(planted, lse_is_exact) in planted.expected


# Two query heads per key head: a block of keys reads the last queries twice.
PADDED = PaddedCase(
    dtype=torch.float16,
    lengths=(150, 150),
    padding=((7, 30), (0, 20)),
    **SETTINGS | {"heads": (2, 1)},
)


@pytest.fixture
def padding_is_ignored():
    """Returns a function that checks that NaN in the padding does not change results."""
    problem = drawn_padded(PADDED)
    inputs = problem.q, problem.k, problem.v

    def results_of_tokens() -> list[Tensor]:
        o, _ = padded(problem, backend="cuda")
        results = o, *torch.autograd.grad(o, inputs, problem.grad_o)
        return [x.transpose(1, 2)[PADDED.mask] for x in results]

    def is_ignored() -> None:
        for result, expected in zip(results_of_tokens(), clean, strict=True):
            assert torch.equal(result, expected)

    clean = results_of_tokens()
    with torch.no_grad():
        for x in (*inputs, problem.grad_o):
            x.transpose(1, 2)[~PADDED.mask] = torch.nan
    return is_ignored


def test_padding_is_not_read(padding_is_ignored):
    padding_is_ignored()


@pytest.mark.parametrize("planted", OF_PADDING, ids=lambda x: x.name)
def test_fault_at_the_end_of_a_sequence_is_found(planted, padding_is_ignored, first_fault):
    assert first_fault(planted, padding_is_ignored) in planted.expected
