"""The Triton kernels against float64, on a GPU or, without one, in the emulator."""

from __future__ import annotations

import math
import mmap

import numpy as np
import pytest
import torch

from biased_flash_attn import biased_flash_attn
from biased_flash_attn.forms import Distance, Geometry
from biased_flash_attn.problem import Problem
from tests.kernels.triton.backend import EMULATED, KERNEL_FORMS, KERNELS, MARKS, Config, attend
from tests.support.biases import DENSE, FORMS
from tests.support.cases import LAYOUTS, Case, pairwise
from tests.support.problems import check, check_beyond_float32, check_problem, drawn, evaluate

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = MARKS


# The parameters for which Triton compiles different kernels. Lengths take few values, and none is 1
# or a multiple of 16, so that tests share compiled kernels.
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
def test_sizes_that_triton_specializes_are_exact(lengths, heads):
    """1 and multiples of 16."""
    check(Case("cumulative-gain", torch.bfloat16, lengths, (1, 16), heads, batch=1), attend)


@pytest.mark.parametrize("bias", FORMS)
def test_every_form_is_exact_over_many_tiles(bias, drawn_dtype):
    """Full tiles on both sides of the queries, tiles across the diagonal, and a partial tile."""
    settings = {"dims": (16, 16), "heads": (4, 2), "batch": 1, "causal": False}
    check(Case(bias, drawn_dtype, (290, 330), **settings), attend)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128)], ids=str)
@pytest.mark.parametrize("bias", FORMS)
def test_every_form_is_exact_at_common_head_dims(bias, dims):
    """Causal, with more tiles than pipeline stages."""
    check(Case(bias, torch.bfloat16, (450, 450), dims, heads=(4, 2), batch=1), attend)


@pytest.mark.skipif(EMULATED, reason="too slow to emulate")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (96, 80)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", FORMS)
def test_every_form_is_exact_at_realistic_sizes(bias, dtype, dims):
    for trained in (True, False):
        check(Case(bias, dtype, (2000, 2000), dims, heads=(4, 2), trained=trained), attend)
    check(Case(bias, dtype, lengths=(700, 1500), dims=dims, causal=False, window=400), attend)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", ["kerple_log", "type2", "t5", "sandwich"])
def test_tables_are_exact_at_all_distances(bias, causal):
    settings = {"lengths": (130, 330), "heads": (4, 2), "batch": 1, "causal": causal}
    check(Case(bias, torch.float16, **settings), attend)


def table_factors(table: torch.Tensor, causal: bool, n_query: int, block: int):
    """The bias that factors give for tiles of `block` queries, and the range in which they apply.

    At entry x of the table, the bias of row r is of_rows[r] of_keys[x] times the scale in base 2,
    if x >= past or x <= future.
    """
    q, k = torch.zeros(1, 1, n_query, 16).half(), torch.zeros(1, 1, n_query, 16).half()
    geometry, form = Geometry(n_query, n_query, causal), Distance(table[None, None])
    call = Problem(q, k, k, form, geometry, 0.25, 0.0, "triton")
    problem = KERNELS.attention.problem_of(call)
    bias = KERNEL_FORMS.kernels_of(call).bias(form.tensors, q.dtype)
    configured = KERNELS.configured.Configured(Config(block, 16), 16, 16, factored=True)
    made = KERNELS.bias_factors.with_factors(bias, problem, configured, None)
    of_rows, of_keys = made.query_factors.start[0, 0], made.key_factors.start[0, 0]
    found = of_keys.double() @ of_rows.double().T * problem.scale_in_base_2
    return found, made.far.start[0, 0].tolist()


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("draw", range(3))
def test_table_factors_are_exact_in_their_range(causal, draw):
    """The table is a random logarithm with a kink at a random distance."""
    n, block = 400, 32
    d = torch.arange(0 if causal else 1 - n, n, dtype=torch.float64)
    kink = 100 * torch.rand(())
    table = -3 * torch.rand(()) * torch.log1p(torch.rand(()) * d.abs()) - (d.abs() - kink).relu()
    found, (past, future) = table_factors(table.float(), causal, n, block)
    rows = table.unfold(0, block, 1) * math.log2(math.e)
    error = (found - rows).abs().amax(1)
    bound = 2**-14 + 2**-20 * rows.abs().amax(1)
    assert (error <= bound)[past:].all()
    assert causal or (error <= bound)[: future + 1].all()
    # Tables are smooth far from their kinks, at 0 and on both sides of it.
    zero = 0 if causal else n - 1
    assert past - zero < 300
    assert causal or zero - future < 300


def test_rough_tables_have_no_factors():
    _, (past, _) = table_factors(torch.randn(400), True, 400, 32)
    assert past > 400 - 32


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1.0])
def test_outliers_limit_the_range_of_table_factors(value):
    table = torch.zeros(400)
    table[250] = value
    assert table_factors(table, True, 400, 128)[1][0] == 251


@pytest.mark.parametrize("bias", ["cumulative", "cumulative-gain"])
def test_logits_beyond_a_closed_gate_may_be_large(bias):
    """Logits of 2^20 exceed the range of float16, but not the rounding of -4e9 to its precision."""
    case = Case(bias, torch.float16, lengths=(200, 200), heads=(4, 2), batch=1)
    problem = drawn(case)
    with torch.no_grad():
        problem.bias.steps[..., 150] = -4e9
        if problem.bias.gain is not None:
            problem.bias.gain.fill_(1)
        problem.q[:, :, 150:] *= 8
        problem.k[:, :, :150] *= 2
    check_beyond_float32(problem, attend)


@pytest.mark.skipif(not EMULATED, reason="compute-sanitizer checks addresses on a GPU")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_out_of_bounds_reads_fault(causal, monkeypatch):
    """Such as those of a table without padding, for queries beyond the last one."""
    from tests.emulator import Fault

    monkeypatch.setattr(KERNEL_FORMS.distance, "padded_table", lambda table: table)
    problem = drawn(Case("distance", lengths=(33, 70), batch=1, causal=causal))
    with pytest.raises(Fault, match="lies in no tensor of the launch"):
        attend(problem)


@pytest.mark.skipif(not EMULATED, reason="needs memory that is committed when written")
@pytest.mark.parametrize(("n", "stride"), [(140, 2**24 - 16), (70, 2**25)], ids=str)
def test_offsets_beyond_2_to_the_31_are_exact(n, stride):
    """Rows are far apart, in memory that is committed only when it is written."""
    problem = drawn(Case("linear", torch.float16, lengths=(n, n), heads=(1, 1), batch=1))
    for name in ("q", "k", "v", "grad_o"):
        memory = np.frombuffer(mmap.mmap(-1, 2 * n * stride), dtype=np.float16)
        x = torch.from_numpy(memory).as_strided((1, 1, n, 16), (0, 0, stride, 1))
        x.copy_(getattr(problem, name).detach())
        setattr(problem, name, x.requires_grad_(name != "grad_o"))
    check_problem(problem, attend)


def test_inputs_may_have_different_strides():
    problem = drawn(Case("cumulative", torch.float16, heads=(4, 4), lengths=(35, 35)))
    for name, layout in zip(("q", "k", "v", "grad_o"), list(LAYOUTS)[1:], strict=True):
        x = getattr(problem, name).detach()
        setattr(problem, name, LAYOUTS[layout](x).requires_grad_(name != "grad_o"))
    check_problem(problem, attend)


@pytest.mark.parametrize("bias", FORMS)
def test_results_are_repeatable(bias, drawn_dtype):
    problem = drawn(Case(bias, drawn_dtype, lengths=(33, 70), heads=(4, 2)))
    first, second = evaluate(problem, attend), evaluate(problem, attend)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_float64_is_refused():
    x = torch.zeros(1, 1, 2, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^backend='triton' has no float64; q may be float32"):
        biased_flash_attn(x, x, x, backend="triton")


def test_tensors_on_other_devices_are_refused():
    x = torch.zeros(1, 1, 2, 16, device="meta")
    with pytest.raises(ValueError, match=r"^backend='triton' needs tensors on .*; q is on meta"):
        biased_flash_attn(x, x, x, backend="triton")


def test_forms_without_kernels_are_refused(monkeypatch):
    monkeypatch.delitem(KERNEL_FORMS.FORMS, "relative")
    problem = drawn(Case("relative", torch.float16))
    with pytest.raises(ValueError, match="the form 'relative', for which backend 'triton' has no"):
        attend(problem)
