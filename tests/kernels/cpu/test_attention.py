"""The CPU kernels against float64: outputs and every gradient."""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn import backends
from tests.support.biases import FORMS, SHIPPED
from tests.support.cases import DTYPES, INSTRUCTION_SETS, LAYOUTS, Case, pairwise
from tests.support.problems import check, check_problem, drawn, evaluate, fused

# One key, less than a vector, and on either side of one and of two tiles of 64 keys.
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


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", SHIPPED)
def test_every_shipped_bias_is_exact(bias, causal):
    check(Case(bias, lengths=(70, 140), heads=(6, 3), causal=causal))


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_scale_is_what_it_was_asked_to_be(scale):
    check(Case("distance", scale=scale))


@pytest.mark.parametrize(
    "heads",
    [(1, 1), (8, 8), (8, 4), (8, 1), (5, 5)],
    ids=lambda heads: "{}x{}".format(*heads),
)
@pytest.mark.parametrize("batch", [1, 3])
def test_query_heads_share_key_heads(heads, batch):
    check(Case("distance", heads=heads, batch=batch, lengths=(90, 150), dims=(8, 8)))


@pytest.mark.parametrize("layouts", pairwise(**{name: list(LAYOUTS) for name in "qkvo"}), ids=str)
def test_each_input_may_have_strides_of_its_own(layouts):
    problem = drawn(Case("cumulative", torch.bfloat16, heads=(4, 4)))
    for name, layout in layouts.items():
        attribute = "grad_o" if name == "o" else name
        x = getattr(problem, attribute).detach()
        setattr(problem, attribute, LAYOUTS[layout](x).requires_grad_(name != "o"))
    check_problem(problem)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_results_lie_in_memory_as_queries_do(backend):
    problem = drawn(Case(heads=(4, 2), dims=(8, 5), layout="heads_inside"))
    o, _ = fused(problem, backend)
    assert o.transpose(1, 2).is_contiguous()
    o, _ = fused(drawn(Case(heads=(4, 2))), backend)
    assert o.is_contiguous()


def test_expanded_cotangents_are_read_right():
    problem = drawn(Case("linear"))
    problem.grad_o = torch.ones(()).expand_as(problem.grad_o)
    problem.grad_lse = torch.full((), 0.5).expand_as(problem.grad_lse)
    check_problem(problem)


@pytest.mark.parametrize("output", [0, 1], ids=["o", "lse"])
def test_either_output_alone_has_gradients(output):
    problem = drawn(Case("cumulative-gain"))
    cotangents = [problem.grad_o, problem.grad_lse]
    leaves = problem.leaves().values()
    alone = torch.autograd.grad(fused(problem)[output], leaves, cotangents[output])

    cotangents[1 - output].zero_()
    both = list(check_problem(problem).values())[2:]
    for of_one, of_two in zip(alone, both, strict=True):
        assert torch.equal(of_one, of_two)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", FORMS)
def test_queries_that_see_no_key_give_zero_and_no_gradient(bias, dtype):
    """With 40 queries more than keys, the first 40 stand before the first key."""
    problem = drawn(Case(bias, dtype, lengths=(110, 70)))
    problem.grad_o[:, :, :40] = 1e4
    problem.grad_lse[:, :, :40] = -torch.inf
    ours = evaluate(problem)
    assert (ours["o"][:, :, :40] == 0).all()
    assert (ours["lse"][:, :, :40] == -torch.inf).all()
    assert (ours["gradient of q"][:, :, :40] == 0).all()

    problem.grad_o[:, :, :40] = 0
    problem.grad_lse[:, :, :40] = 0
    quiet = evaluate(problem)
    for name, gradient in ours.items():
        assert torch.equal(gradient, quiet[name]), f"{name} has a part of queries without keys"


@pytest.mark.parametrize("bias", FORMS)
@pytest.mark.parametrize(
    ("batch", "lengths"),
    [(0, (5, 5)), (2, (0, 5)), (2, (5, 0)), (2, (0, 0))],
    ids=["no-sequence", "no-query", "no-key", "neither"],
)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_nothing_in_gives_nothing_out(bias, batch, lengths, causal):
    ours = evaluate(drawn(Case(bias, lengths=lengths, batch=batch, causal=causal)))
    assert ours["o"].shape == (batch, 2, lengths[0], 16)
    assert (ours["o"] == 0).all()
    assert (ours["lse"] == -torch.inf).all()
    assert all((x == 0).all() for name, x in ours.items() if name.startswith("gradient"))
