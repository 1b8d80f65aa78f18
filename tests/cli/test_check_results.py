"""The results of `check`: oracle, rows, planted faults, and peers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from biased_flash_attn import backends
from biased_flash_attn.backends.reference import attention
from biased_flash_attn.cli.checking import accuracy, oracle, sizes, timing
from biased_flash_attn.cli.checking.checked_form import (
    KEYS,
    QUERIES,
    TOKENS,
    CheckedForm,
    Numbers,
)
from biased_flash_attn.cli.checking.forms import FORMS, TIMED, Normalized
from biased_flash_attn.cli.checking.problems import (
    CALLS,
    DECODING_STEPS,
    DTYPES,
    HEADS,
    INPUTS,
    draw,
    sequences_of,
)
from biased_flash_attn.cli.checking.timing import DENSE, FLEX, OURS, PLAIN, Race
from biased_flash_attn.cli.clock import CpuClock, medians
from biased_flash_attn.cli.flex import captured, score_mod
from biased_flash_attn.forms import Dense, Geometry, names
from tests.cli.planted_faults import FAULTS, KERNELS, LENGTH, plant


@pytest.fixture(autouse=True)
def blocks_of_longer_sequences(monkeypatch):
    """As many blocks as in the shortest sequences that `check` chooses. The terms of fewer blocks
    are more likely to cancel, and the permitted error is relative to their sum."""
    monkeypatch.setattr(Normalized, "block", LENGTH // 8)


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_oracle_is_attention_over_each_whole_sequence(form, call, seed, monkeypatch):
    monkeypatch.setattr(CheckedForm, "block", 16)
    problem = draw(form, call, LENGTH, torch.float64, seed, "cpu")
    found = oracle.results(problem).values
    o, lse = torch.zeros_like(problem.grad_o), torch.zeros_like(problem.grad_lse)
    for entry, rows in problem.sequences:
        q, k, v = (problem.leaves[name][entry : entry + 1, :, rows] for name in ("q", "k", "v"))
        bias = whole_bias(problem, entry, rows)
        geometry = Geometry(len(rows), len(rows), call.causal)
        results = attention(q, k, v, bias, geometry, call.head_dim**-0.5)
        shown = slice(-sum(DECODING_STEPS) if call.name == "decoding" else 0, None)
        for whole, own in zip((o, lse), results, strict=True):
            whole[entry, :, rows[shown]] = own[0, :, shown]
    expected = {"o": o, "lse": lse}
    if call.name != "decoding":
        grads = problem.grad_o, problem.grad_lse
        gradients = torch.autograd.grad((o, lse), [*problem.leaves.values()], grads)
        names = (f"gradient of {name}" for name in problem.leaves)
        expected.update(zip(names, gradients, strict=True))
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x.detach(), msg=name)


def whole_bias(problem, entry, rows):
    """By the package's own dense views."""
    own = dict.fromkeys((TOKENS, QUERIES, KEYS), rows)
    bias = problem.form.bias(problem.form.selected(problem.tensors, entry, **own))
    return bias and bias.dense(len(rows), len(rows))


def test_every_form_of_the_package_is_checked(seed):
    checked = {"none"}
    for form in FORMS:
        bias = draw(form, CALLS[0], LENGTH, torch.float32, seed, "cpu").bias()
        if bias is not None:
            checked.add(bias.lower(Geometry(LENGTH, LENGTH), torch.float64, None).name)
    assert checked == set(names())


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_represents_the_numbers_exactly(form, seed):
    problem = draw(form, CALLS[0], LENGTH, torch.bfloat16, seed, "cpu")
    for dtype in (torch.bfloat16, torch.float16):
        narrow = problem.to(dtype)
        assert {narrow.leaves[name].dtype for name in INPUTS} == {dtype}
        assert torch.equal(narrow.grad_o.double(), problem.grad_o)
        for name, x in problem.leaves.items():
            assert torch.equal(narrow.leaves[name].double(), x), name
    single = draw("none", CALLS[0], LENGTH, torch.float32, seed, "cpu")
    assert not torch.equal(single.grad_o.bfloat16().double(), single.grad_o)


def test_queries_near_a_jump_of_the_derivative_have_no_gradients(seed):
    form, tokens, query = Normalized(), torch.arange(500), 400
    numbers = Numbers(torch.Generator().manual_seed(seed), (2, HEADS, 500), 500, False)
    tensors = form.draw(numbers)
    distance = torch.randint(1, query, ())
    x = form.psi(tensors, distance) / form.normalizers(tensors, tokens[query, None])
    weight, bias = tensors["mlp.0.weight"][:, 0], tensors["mlp.0.bias"]
    bias[3] = -(weight[3] * x).item()
    is_smooth = form.is_smooth(tensors, tokens)
    assert not is_smooth[query]
    assert is_smooth.double().mean() > 0.8

    problem = draw("normalized", CALLS[0], 500, torch.float32, seed, "cpu")
    is_smooth = form.is_smooth(problem.tensors, tokens)
    for grad in (problem.grad_o[..., 0], problem.grad_lse):
        assert torch.equal(grad != 0, is_smooth.expand(2, HEADS, -1))


def test_packed_sequences_contain_every_row_once():
    sequences, (batch, tokens) = sequences_of(CALLS[2], LENGTH)
    assert CALLS[2].name == "packed"
    assert batch == 1
    assert torch.equal(torch.cat([rows for _, rows in sequences]), torch.arange(tokens))
    assert max(len(rows) for _, rows in sequences) <= LENGTH
    assert min(len(rows) for _, rows in sequences) == 1


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_the_kernels_pass(form, call, seed):
    found = list(accuracy.rows(form, call, LENGTH, seed, "cpu", "cpu"))
    assert [row.dtype for row in found] == list(DTYPES)
    for row in found:
        assert row.passed, row
    results = {error.result for error in found[0].errors}
    assert {"o", "lse"} <= results
    assert ("gradient of q" in results) == (call.name != "decoding")


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_wrong_result_is_found_in_every_dtype(fault, monkeypatch, seed):
    fault.plant(monkeypatch)
    for row in accuracy.rows(fault.form, CALLS[0], LENGTH, seed, "cpu", "cpu"):
        assert not row.passed, row
        assert fault.result in {error.result for error in row.errors if error.fraction > 1}, row


def test_the_gradient_of_every_tensor_of_a_bias_has_a_fault(seed):
    planted = {(fault.form, fault.result) for fault in FAULTS}
    for form in FORMS:
        problem = draw(form, CALLS[0], LENGTH, torch.float32, seed, "cpu")
        assert {(form, f"gradient of {name}") for name in problem.tensors} <= planted


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_step_of_decoding_is_found(form, monkeypatch, seed):
    plant(monkeypatch, "decode", 0, lambda x: x.mul_(1.05))
    (call,) = (call for call in CALLS if call.name == "decoding")
    for row in accuracy.rows(form, call, LENGTH, seed, "cpu", "cpu"):
        assert row.worst.result == "o"
        assert not row.passed


def test_results_that_do_not_repeat_are_found(monkeypatch, seed):
    change = itertools.cycle([1.0, 1 + 2**-22])
    plant(monkeypatch, "forward", 0, lambda x: x.mul_(next(change)))
    row = next(accuracy.rows("none", CALLS[0], LENGTH, seed, "cpu", "cpu"))
    assert row.worst.fraction < 1
    assert not row.repeats
    assert not row.passed


def test_a_failing_kernel_has_its_own_row(monkeypatch, seed):
    def fails(*_):
        raise RuntimeError("out of resources: shared memory\nand more")

    monkeypatch.setattr(KERNELS, "forward", fails)
    found = list(accuracy.rows("none", CALLS[0], LENGTH, seed, "cpu", "cpu"))
    assert [row.failure for row in found] == ["RuntimeError: out of resources: shared memory"] * 3


def test_an_error_of_the_gpu_ends_the_process(monkeypatch, seed):
    def fails(*_):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(KERNELS, "forward", fails)
    rows = accuracy.rows("none", CALLS[0], LENGTH, seed, "cpu", "cpu")
    assert "illegal memory access" in next(rows).failure
    with pytest.raises(torch.AcceleratorError):
        next(rows)


def test_a_refused_dtype_is_not_a_failure(monkeypatch, seed):
    def refusal(problem):
        return "has no bfloat16" if problem.q.dtype == torch.bfloat16 else ""

    monkeypatch.setattr(backends.get("cpu"), "refusal", refusal)
    found = {row.dtype: row for row in accuracy.rows("none", CALLS[0], LENGTH, seed, "cpu", "cpu")}
    assert found["bfloat16"].refusal == "backend='cpu' has no bfloat16"
    assert found["float16"].passed


def test_errors_are_relative_to_results_in_the_same_block(seed):
    """An error that is small beside the largest output counts where outputs are small."""
    problem = draw("none", CALLS[0], 2 * accuracy.BLOCK_ROWS, torch.float32, seed, "cpu")
    problem = problem.to(torch.float32)
    exact = oracle.results(problem.to(torch.float64))
    found = {name: x.clone() for name, x in exact.values.items()}
    last = found["o"][1, 3, -1]
    last += 1e-3 * last
    wrong = {e.result: e for e in accuracy.errors(problem, found, exact) if e.fraction > 1}
    assert wrong.keys() == {"o"}
    assert wrong["o"].place == "[1, 3, 128:256]"


@pytest.mark.parametrize("form", TIMED)
def test_all_sides_compute_the_same(form, seed):
    race = Race(form, LENGTH, 16, torch.float32, seed, "cpu", "cpu")
    race.prepare(with_flex=False)
    assert race.sides.keys() == {OURS, PLAIN, DENSE}
    assert race.notes == {FLEX: timing.NOT_COMPILED}
    torch.testing.assert_close(race.sides[DENSE].attend(), race.sides[OURS].attend())
    seconds = race.timing()
    assert seconds.forward.keys() == seconds.training.keys() == race.sides.keys()


def test_a_failing_peer_is_reported(monkeypatch, seed):
    def fails(*_, attn_mask=None, **__):
        raise RuntimeError("no kernel for this GPU")

    monkeypatch.setattr(F, "scaled_dot_product_attention", fails)
    race = Race("linear", LENGTH, 16, torch.float32, seed, "cpu", "cpu")
    race.prepare(with_flex=False)
    assert race.sides.keys() == {OURS}
    assert race.notes[DENSE] == race.notes[PLAIN] == "RuntimeError: no kernel for this GPU"


def test_a_peer_with_different_results_is_reported(monkeypatch, seed):
    right = F.scaled_dot_product_attention
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda *args, **kwargs: 2 * right(*args, **kwargs)
    )
    race = Race("linear", LENGTH, 16, torch.float32, seed, "cpu", "cpu")
    race.prepare(with_flex=False)
    assert race.notes[DENSE] == "its output differs by 100.0%"
    assert PLAIN not in race.notes  # which has no bias


@pytest.mark.parametrize("form", TIMED)
def test_flex_attention_gets_the_same_bias(form, seed):
    problem = draw(form, CALLS[0], LENGTH, torch.float32, seed, "cpu").to(torch.float32)
    bias, n = problem.bias(), torch.arange(LENGTH)
    modify = score_mod(
        *unpacked(captured(bias and bias.lower(Geometry(LENGTH, LENGTH), torch.float32, None)))
    )
    if form == "none":
        assert modify is None
        return
    b, h, i, j = torch.meshgrid(torch.arange(2), torch.arange(HEADS), n, n, indexing="ij")
    scores = torch.randn(b.shape)
    dense = torch.stack(
        [oracle.dense_bias(problem, e, n, slice(0, LENGTH), LENGTH)[0] for e in range(2)]
    )
    visible = j <= i
    torch.testing.assert_close(
        modify(scores, b, h, i, j)[visible], (scores + dense.float())[visible]
    )


def test_a_form_without_a_score_mod_is_named():
    with pytest.raises(NotImplementedError, match="the form 'dense' has no score_mod"):
        captured(Dense(torch.zeros(1, 1, 3, 3)))


def unpacked(named):
    name, numbers = named
    return name, *numbers


def test_timed_calls_alternate(monkeypatch):
    order, seconds = [], {"a": iter([9, 1, 5, 2]), "b": iter([9, 4, 6, 8])}

    class Clock(CpuClock):
        def seconds(self, call):
            call()
            return next(seconds[order[-1]])

    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    assert medians(calls, Clock(), 600, rounds=3) == {"a": 2, "b": 6}
    assert "".join(order) == "abababab"


def test_slow_calls_have_three_rounds():
    count = itertools.count()
    medians({"slow": lambda: next(count)}, CpuClock(), seconds=-1)
    assert next(count) == 4  # the first warms up


@pytest.mark.parametrize(
    ("fraction", "length"), [(1e-9, 2048), (0.9 / 16, 1024), (0.9 / 4, 512), (0.9, 256), (100, 256)]
)
def test_the_length_fits_into_the_time(monkeypatch, fraction, length):
    """If 256 tokens take a fraction of the time, and twice as many take four times as long."""
    of_row = sizes.ORACLE_SECONDS / (len(FORMS) * len(CALLS) * sizes.COST_FACTOR)
    measured = []

    def seconds(_, length, seed):
        measured.append(length)
        return fraction * of_row * (length / 256) ** 2

    monkeypatch.setattr(sizes, "oracle_seconds", seconds)
    assert sizes.fitting_length("cpu", 0) == length
    assert max(measured) <= 2 * length  # what cannot fit is not measured
