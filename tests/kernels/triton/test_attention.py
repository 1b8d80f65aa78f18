"""The Triton kernels against float64: on a GPU or, where there is none, emulated."""

from __future__ import annotations

import math
import mmap

import numpy as np
import pytest
import torch

from biased_flash_attn import biased_flash_attn
from biased_flash_attn.forms import Distance, Geometry
from biased_flash_attn.problem import Problem
from tests.kernels.cpu.test_precision import (
    check_beyond_float32,
    left_of_cancelling,
    one_large_step,
)
from tests.kernels.triton.backend import EMULATED, KERNELS, MARKS, Config, attend
from tests.support.biases import DENSE, FORMS, SHIPPED
from tests.support.cases import LAYOUTS, Case, pairwise
from tests.support.problems import check, check_problem, drawn, evaluate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = MARKS


# What the compiler makes other kernels of. Numbers that differ by nothing but their value are few,
# and none is 1 or a multiple of 16, so that tests share what is compiled.
COMBINATIONS = pairwise(
    bias=[*FORMS, *DENSE],
    dtype=DTYPES,
    lengths=[(17, 63), (63, 17), (130, 130)],
    dims=[(16, 16), (64, 64), (19, 80)],
    heads=[(4, 2)],
    causal=[True, False],
    window=[None, 5, 500],
    trained=[True, False],
)


@pytest.mark.parametrize("case", [Case(**row) for row in COMBINATIONS], ids=str)
def test_every_pair_of_settings_is_exact(case):
    check(case, attend)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dims", [(16, 16), (40, 3)], ids=str)
def test_every_layout_is_exact(layout, dims):
    check(Case("linear", torch.float16, (35, 70), dims, heads=(4, 2), layout=layout), attend)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 65), (64, 64), (16, 128)], ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1)], ids=str)
def test_numbers_that_compilers_treat_apart_are_exact(lengths, heads):
    """1, and multiples of 16."""
    check(Case("cumulative-gain", torch.bfloat16, lengths, (1, 16), heads, batch=1), attend)


@pytest.mark.parametrize("bias", FORMS)
def test_every_form_is_exact_over_many_tiles(bias, drawn_dtype):
    """Whole tiles on both sides of the queries, tiles among them, and a rest."""
    settings = {"dims": (16, 16), "heads": (4, 2), "batch": 1, "causal": False}
    check(Case(bias, drawn_dtype, (290, 330), **settings), attend)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("bias", FORMS)
def test_every_form_is_exact_with_heads_as_they_are_used(bias, dims):
    """Causal, with more tiles than a pipeline has stages."""
    check(Case(bias, torch.bfloat16, (450, 450), dims, heads=(4, 2), batch=1), attend)


@pytest.mark.skipif(EMULATED, reason="too slow to emulate")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (96, 80)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", FORMS)
def test_every_form_is_exact_at_real_sizes(bias, dtype, dims):
    for trained in (True, False):
        check(Case(bias, dtype, (2000, 2000), dims, heads=(4, 2), trained=trained), attend)
    check(Case(bias, dtype, lengths=(700, 1500), dims=dims, causal=False, window=400), attend)


@pytest.mark.parametrize("bias", SHIPPED)
def test_every_shipped_bias_is_exact(bias):
    check(Case(bias, torch.float16, lengths=(33, 70), heads=(4, 2)), attend)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", ["kerple_log", "type2", "t5", "sandwich"])
def test_tables_are_exact_near_and_far(bias, causal):
    settings = {"lengths": (130, 330), "heads": (4, 2), "batch": 1, "causal": causal}
    check(Case(bias, torch.float16, **settings), attend)


def table_factors(table: torch.Tensor, causal: bool, n_query: int, block: int):
    """The factors of tiles of `block` queries, and where they hold: at x of the table, the bias of
    row r is of_rows[r] of_keys[x] times the scale in base 2, where x is at least past or at most
    future."""
    q, k = torch.zeros(1, 1, n_query, 16).half(), torch.zeros(1, 1, n_query, 16).half()
    geometry, form = Geometry(n_query, n_query, causal), Distance(table[None, None])
    call = Problem(q, k, k, form, geometry, 0.25, 0.0, "triton")
    problem = KERNELS.attention.problem_of(call)
    bias = KERNELS.forms.kernels_of(call).bias(form.tensors, q.dtype)
    configured = KERNELS.configured.Configured(Config(block, 16), 16, 16, factored=True)
    made = KERNELS.bias_factors.with_factors(bias, problem, configured, None)
    of_rows, of_keys = made.query_factors.start[0, 0], made.key_factors.start[0, 0]
    found = of_keys.double() @ of_rows.double().T * problem.scale_in_base_2
    return found, made.far.start[0, 0].tolist()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("draw", range(3))
def test_factors_of_a_table_hold_where_they_are_said_to(causal, draw):
    """Beyond a kink, at a place of its own, the table is a random logarithm."""
    n, block = 400, 32
    d = torch.arange(0 if causal else 1 - n, n, dtype=torch.float64)
    kink = 100 * torch.rand(())
    table = -3 * torch.rand(()) * torch.log1p(torch.rand(()) * d.abs()) - (d.abs() - kink).relu()
    found, (past, future) = table_factors(table.float(), causal, n, block)
    rows = table.unfold(0, block, 1) * math.log2(math.e)
    wrong = (found - rows).abs().amax(1)
    bound = 2**-14 + 2**-20 * rows.abs().amax(1)
    assert (wrong <= bound)[past:].all()
    assert causal or (wrong <= bound)[: future + 1].all()
    # Far from the kinks, which are at 0 and on both sides of it, tables are smooth.
    zero = 0 if causal else n - 1
    assert past - zero < 300
    assert causal or zero - future < 300


def test_a_rough_table_has_no_factors():
    _, (past, _) = table_factors(torch.randn(400), True, 400, 32)
    assert past > 400 - 32


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1.0])
def test_no_factors_of_a_table_hold_where_one_distance_differs(value):
    table = torch.zeros(400)
    table[250] = value
    assert table_factors(table, True, 400, 128)[1][0] == 251


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_distances_of_minus_infinity_are_masked(causal, drawn_dtype):
    problem = drawn(Case("distance", drawn_dtype, (100, 100), heads=(4, 2), batch=1, causal=causal))
    table = problem.bias
    d = torch.arange(table.r.shape[1]) - table.origin
    hidden = (d.abs() >= 40) | (d == 3)
    with torch.no_grad():
        table.r[:, hidden] = -torch.inf
    ours = check_problem(problem, attend)
    assert (ours["gradient of r"][:, hidden] == 0).all()


@pytest.mark.parametrize("step", [-1e3, -1e9])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", ["cumulative", "cumulative-gain", "log1p_square"])
def test_one_large_step_leaves_its_neighbours_exact(bias, causal, drawn_dtype, step):
    case = Case(bias, drawn_dtype, lengths=(100, 130), heads=(4, 2), batch=1, causal=causal)
    check_beyond_float32(one_large_step(case, step), attend)


@pytest.mark.parametrize("bias", ["cumulative", "cumulative-gain"])
def test_logits_behind_a_closed_gate_may_be_any(bias):
    """2^20 is more than float16 holds, and less than a logit of -4e9 is rounded by."""
    case = Case(bias, torch.float16, lengths=(200, 200), heads=(4, 2), batch=1)
    problem = drawn(case)
    with torch.no_grad():
        problem.bias.steps[..., 150] = -4e9
        if problem.bias.gain is not None:
            problem.bias.gain.fill_(1)
        problem.q[:, :, 150:] *= 8
        problem.k[:, :, :150] *= 2
    check_beyond_float32(problem, attend)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("dims", [(16, 16), (80, 80)], ids=str)
@pytest.mark.parametrize("bias", ["cumulative", "cumulative-gain"])
def test_shares_of_queries_and_keys_cancel_in_gradients_of_steps(bias, dims, causal):
    assert left_of_cancelling(attend, bias, dims, causal) <= 2**-12


@pytest.mark.skipif(not EMULATED, reason="addresses on a GPU are left to compute-sanitizer")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_reads_beyond_a_tensor_are_errors(causal, monkeypatch):
    """As those of a table without a margin, for queries beyond the last one."""
    from tests.emulator import Fault

    monkeypatch.setattr(KERNELS.forms, "padded_table", lambda table: table)
    problem = drawn(Case("distance", lengths=(33, 70), batch=1, causal=causal))
    with pytest.raises(Fault, match="lies in no tensor of the launch"):
        attend(problem)


@pytest.mark.skipif(not EMULATED, reason="memory of a GPU is not there before it is written")
@pytest.mark.parametrize(("n", "apart"), [(140, 2**24 - 16), (70, 2**25)], ids=str)
def test_addresses_beyond_2_to_the_31_are_reached(n, apart):
    """Of rows that lie far apart, in memory that is not there until it is written."""
    problem = drawn(Case("linear", torch.float16, lengths=(n, n), heads=(1, 1), batch=1))
    expected = evaluate(problem, attend)
    for name in ("q", "k", "v", "grad_o"):
        memory = np.frombuffer(mmap.mmap(-1, 2 * n * apart), dtype=np.float16)
        x = torch.from_numpy(memory).as_strided((1, 1, n, 16), (0, 0, apart, 1))
        x.copy_(getattr(problem, name).detach())
        setattr(problem, name, x.requires_grad_(name != "grad_o"))
    for name, far_apart in evaluate(problem, attend).items():
        assert torch.equal(far_apart, expected[name]), name


@pytest.mark.parametrize("scale", [0.0, -0.7, 1e-9, 3.0])
@pytest.mark.parametrize("bias", ["none", "linear", "distance", "cumulative-gain"])
def test_scale_is_what_it_was_asked_to_be(bias, scale):
    check(Case(bias, torch.float16, lengths=(40, 70), heads=(4, 2), scale=scale), attend)


def test_each_input_may_have_strides_of_its_own():
    problem = drawn(Case("cumulative", torch.float16, heads=(4, 4), lengths=(35, 35)))
    for name, layout in zip(("q", "k", "v", "grad_o"), list(LAYOUTS)[1:], strict=True):
        x = getattr(problem, name).detach()
        setattr(problem, name, LAYOUTS[layout](x).requires_grad_(name != "grad_o"))
    check_problem(problem, attend)


def test_expanded_cotangents_are_read_right():
    problem = drawn(Case("linear", torch.float16, lengths=(35, 35), heads=(4, 2)))
    problem.grad_o = torch.ones(()).expand_as(problem.grad_o)
    problem.grad_lse = torch.full((), 0.5).expand_as(problem.grad_lse)
    check_problem(problem, attend)


@pytest.mark.parametrize("bias", FORMS)
def test_queries_that_see_no_key_give_zero_and_no_gradient(bias, drawn_dtype):
    problem = drawn(Case(bias, drawn_dtype, lengths=(60, 25), heads=(4, 2)))
    problem.grad_o[:, :, :35] = 1e4
    problem.grad_lse[:, :, :35] = -torch.inf
    ours = evaluate(problem, attend)
    assert (ours["o"][:, :, :35] == 0).all()
    assert (ours["lse"][:, :, :35] == -torch.inf).all()
    assert (ours["gradient of q"][:, :, :35] == 0).all()
    assert all(x[:, :, 35:].isfinite().all() for name, x in ours.items() if name in ("o", "lse"))

    problem.grad_o[:, :, :35] = 0
    problem.grad_lse[:, :, :35] = 0
    for name, quiet in evaluate(problem, attend).items():
        assert torch.equal(ours[name], quiet), f"{name} has a part of queries without keys"


@pytest.mark.parametrize("bias", FORMS)
@pytest.mark.parametrize(("batch", "lengths"), [(0, (5, 5)), (2, (0, 5)), (2, (5, 0))])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_nothing_in_gives_nothing_out(bias, batch, lengths, causal):
    ours = evaluate(
        drawn(Case(bias, torch.float16, lengths, heads=(4, 2), batch=batch, causal=causal)), attend
    )
    assert ours["o"].shape == (batch, 4, lengths[0], 16)
    assert (ours["o"] == 0).all()
    assert (ours["lse"] == -torch.inf).all()
    assert all((x == 0).all() for name, x in ours.items() if name.startswith("gradient"))


@pytest.mark.parametrize("bias", FORMS)
def test_two_runs_give_the_same_bits(bias):
    problem = drawn(Case(bias, torch.float16, lengths=(40, 70), heads=(4, 2)))
    first, second = evaluate(problem, attend), evaluate(problem, attend)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_float64_is_refused():
    x = torch.zeros(1, 1, 2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^backend='triton' has no float64; q may be float32"):
        biased_flash_attn(x, x, x, backend="triton")


def test_tensors_elsewhere_are_refused():
    x = torch.zeros(1, 1, 2, 16, device="meta")
    with pytest.raises(ValueError, match=r"^backend='triton' needs tensors on .*; q is on meta"):
        biased_flash_attn(x, x, x, backend="triton")


def test_forms_without_kernels_are_refused(monkeypatch):
    monkeypatch.delitem(KERNELS.forms.FORMS, "relative")
    problem = drawn(Case("relative", torch.float16))
    with pytest.raises(ValueError, match="the form 'relative', for which backend 'triton' has no"):
        attend(problem)
