"""The CPU kernels against float64: outputs and every gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from biased_flash_attn import backends
from tests.support.biases import FORMS, SAME_DTYPE, WIDE
from tests.support.cases import DTYPES, INSTRUCTION_SETS, LAYOUTS, Case, pairwise
from tests.support.problems import check, check_problem, drawn, fused

# One key, fewer keys than a vector has lanes, and lengths around one and two tiles of 64 keys.
LENGTHS = [
    (1, 1),
    (17, 17),
    (63, 63),
    (64, 64),
    (65, 65),
    (128, 128),
    (130, 130),
    (1, 130),
    (17, 65),
    (65, 17),
    (130, 63),
]
DIMS = [
    (1, 1),
    (16, 16),
    (40, 40),
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (256, 256),
    (64, 80),
    (96, 1),
    (3, 128),
]
COMBINATIONS = pairwise(
    bias=list(FORMS),
    dtype=DTYPES,
    lengths=LENGTHS,
    dims=DIMS,
    heads=[(1, 1), (4, 2), (3, 1)],
    causal=[True, False],
    window=[None, 1, 5, 64, 500],
    layout=list(LAYOUTS),
    trained=[True, False],
    instruction_set=INSTRUCTION_SETS,
)


@pytest.mark.parametrize(
    ("instruction_set", "case"),
    [(row.pop("instruction_set"), Case(**row)) for row in COMBINATIONS],
    ids=str,
)
def test_every_pair_of_settings_is_exact(instruction_set, case):
    with backends.instruction_set(instruction_set):
        check(case)


@pytest.mark.sanitize
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", FORMS)
def test_every_form_is_exact_in_every_dtype(bias, dtype, instruction_set):
    with backends.instruction_set(instruction_set):
        check(Case(bias, dtype, lengths=(67, 131), dims=(19, 7), heads=(2, 1), batch=1, window=70))
        check(Case(bias, dtype, lengths=(35, 9), dims=(8, 33), causal=False, layout="shifted"))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", WIDE)
def test_vectors_as_wide_as_heads_are_exact(bias, dtype, instruction_set):
    with backends.instruction_set(instruction_set):
        check(Case(bias, dtype, lengths=(63, 130), dims=(64, 17), heads=(2, 1), batch=1))
        check(Case(bias, dtype, lengths=(130, 17), dims=(16, 16), causal=False, layout="sliced"))


@pytest.mark.sanitize
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", SAME_DTYPE)
def test_vectors_in_the_dtype_of_the_inputs_are_exact(bias, dtype, instruction_set):
    """Distances within the table, which is longer than one panel, and beyond both its ends."""
    with backends.instruction_set(instruction_set):
        check(Case(bias, dtype, lengths=(130, 1700), dims=(16, 17), heads=(2, 1), batch=1))
        check(Case(bias, dtype, lengths=(330, 330), dims=(16, 16), heads=(1, 1), causal=False))


@pytest.mark.parametrize(
    "heads",
    [(1, 1), (8, 8), (8, 4), (8, 1), (5, 5)],
    ids=lambda heads: "{}x{}".format(*heads),
)
@pytest.mark.parametrize("batch", [1, 3])
def test_query_heads_share_key_heads(heads, batch):
    check(Case("distance", heads=heads, batch=batch, lengths=(90, 150), dims=(8, 8)))


@pytest.mark.parametrize("layouts", pairwise(**{name: list(LAYOUTS) for name in "qkvo"}), ids=str)
def test_inputs_may_have_different_strides(layouts):
    problem = drawn(Case("cumulative", torch.bfloat16, heads=(4, 4)))
    for name, layout in layouts.items():
        attribute = "grad_o" if name == "o" else name
        x = getattr(problem, attribute).detach()
        setattr(problem, attribute, LAYOUTS[layout](x).requires_grad_(name != "o"))
    check_problem(problem)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dims", [(257, 512), (320, 320), (512, 257)], ids=str)
@pytest.mark.parametrize("bias", ["none", "distance", "cumulative", "dense"])
def test_heads_of_up_to_512_channels(bias, dims, backend):
    for dtype in (torch.float32, torch.bfloat16):
        case = Case(bias, dtype, lengths=(67, 131), dims=dims, heads=(2, 1), batch=1)
        check(case, partial(fused, backend=backend))
