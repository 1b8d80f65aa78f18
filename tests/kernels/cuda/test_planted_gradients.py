"""Faults planted in the backward kernels for dq, and for dk and dv, and in the sums of diagonals of
all backward kernels, which the emulator must find."""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn.cuda_kernels import table_gradient
from tests.kernels.cuda.backend import EMULATED, MARKS, check
from tests.kernels.cuda.planted import EARLY, OUT_OF_STEP, SETTINGS, WRONG, Planted
from tests.support.cases import Case
from tests.support.problems import drawn

pytestmark = [*MARKS, pytest.mark.skipif(not EMULATED, reason="faults may hang a GPU")]

OF_GRADIENTS = [
    Planted("own rows are not waited for", EARLY, source, "shared.own_full.wait(0);")
    for source in ("backward_queries.cu", "backward_keys.cu")
]
OF_GRADIENTS += [
    Planted(
        "dS is computed before dP is complete",
        EARLY,
        "backward_keys.cu",
        "wait_products<0>(grad_s);",
    ),
    Planted(
        "dq is rescaled before it is complete",
        EARLY,
        "backward_queries.cu",
        "accumulate();\n        wait_products<0>(dq, rounded);",
        "accumulate();",
    ),
    Planted(
        "keys are released under the product with dS",
        {"race"},
        "backward_queries.cu",
        "wait_products<0>(dq, rounded);\n            __syncwarp();\n            if (leads_warp) "
        "shared.ring.release(previous);",
        "if (leads_warp) shared.ring.release(previous); wait_products<0>(dq, rounded);",
    ),
    Planted(
        "queries are full without lse and D",
        OUT_OF_STEP,
        "backward_keys.cu",
        "shared.init(true);",
        "shared.init(false);",
    ),
    Planted(
        "tiles are never released",
        {"deadlock"},
        "backward_keys.cu",
        "if (leads_warp) shared.ring.release(stage);",
    ),
    Planted(
        "keys after the query get a gradient",
        {WRONG},
        "key_logits.cuh",
        "s[n] = -kInfinity;",
        ";",
    ),
]

# The kernel for all gradients computes the first, and that for dq the second, with wider values.
# There are more blocks than slots, so that two launches add to one of them.
TABLES = {
    source: Case("distance", torch.float16, (300, 300), dims, (1, 1), batch=1, causal=False)
    for source, dims in [("backward.cu", (8, 8)), ("backward_queries.cu", (8, 136))]
}
OF_TABLES = [
    Planted(
        "diagonals are summed before dS is stored",
        OUT_OF_STEP,
        "diagonals.cuh",
        "ring_.wait_until_full(stage);",
    ),
    Planted(
        "dS is replaced before its diagonals are summed",
        OUT_OF_STEP,
        "diagonals.cuh",
        "ring_.wait_until_empty(stage);",
    ),
    Planted(
        "dS is complete when one group has stored it",
        OUT_OF_STEP,
        "diagonals.cuh",
        "ring_.init(kConsumerWarps, kSummers);",
        "ring_.init(kConsumerWarps / 2, kSummers);",
    ),
    Planted(
        "diagonals are never released",
        {"deadlock"},
        "diagonals.cuh",
        "if (lane == 0) ring_.release(stage);",
    ),
    Planted("margins are not cleared", EARLY, "diagonals.cuh", "x[n] = 0;", ";"),
    Planted(
        "the last distances are lost",
        {WRONG},
        "diagonals.cuh",
        "n < count + kSpan - 1",
        "n < count",
    ),
    Planted(
        "the sums of an earlier launch are lost",
        {WRONG},
        "diagonals.cuh",
        "*sum += sums[0];",
        "*sum = sums[0];",
    ),
]
OF_TABLES += [
    Planted("blocks share a slot", {"race", WRONG}, "diagonals.cuh", "number % params.slots", "0")
]
OF_TABLES = {source: list(OF_TABLES) for source in TABLES}
OF_TABLES["backward.cu"] += [
    Planted(
        "dS is replaced when one warp has summed its diagonals",
        OUT_OF_STEP,
        "diagonals.cuh",
        "ring_.init(kConsumerWarps, kSummers);",
        "ring_.init(kConsumerWarps, 1);",
    )
]


@pytest.mark.parametrize("planted", OF_GRADIENTS, ids=lambda x: x.name)
def test_fault_of_gradients_is_found(planted, first_fault):
    settings = SETTINGS | {"causal": True, "trained": True}
    problem = drawn(Case("log1p_square", torch.bfloat16, (300, 300), batch=1, **settings))
    assert first_fault(planted, lambda: check(problem)) in planted.expected


@pytest.mark.parametrize(
    ("kernel", "planted"),
    [
        pytest.param(source, planted, id=f"{source}-{planted.name}")
        for source, of_kernel in OF_TABLES.items()
        for planted in of_kernel
    ],
)
def test_fault_of_the_gradient_of_a_table_is_found(kernel, planted, first_fault, monkeypatch):
    monkeypatch.setattr(table_gradient, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(table_gradient, "MOST_OF_Q", 1)
    problem = drawn(TABLES[kernel])
    assert first_fault(planted, lambda: check(problem)) in planted.expected
