"""Packed sequences equal separate calls, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biased_flash_attn import backends, biased_flash_attn, biased_flash_attn_varlen, biases
from biased_flash_attn.attention import prepared
from biased_flash_attn.operators import planned
from biased_flash_attn.sequences import Sequences
from tests.sequences.packed_cases import PackedCase, drawn_packed, packed
from tests.support.biases import FORMS
from tests.support.cases import DTYPES, INSTRUCTION_SETS, pairwise
from tests.support.problems import check_problem, evaluate, prepared_call


def same(*lengths: int):
    return tuple((n, n) for n in lengths)


COMBINATIONS = pairwise(
    bias=list(FORMS),
    dtype=DTYPES,
    sequences=[
        same(1, 17, 0, 63, 130),
        same(70),
        ((5, 30), (0, 7), (9, 0), (30, 5), (1, 65)),
        same(0, 0, 1),
        same(33, 200, 33),
    ],
    dims=[(16, 16), (40, 8), (3, 64)],
    heads=[(1, 1), (4, 2), (3, 1)],
    causal=[True, False],
    window=[None, 1, 20, 500],
    layout=["contiguous", "heads_inside", "sliced", "shifted"],
    instruction_set=INSTRUCTION_SETS,
)


@pytest.mark.parametrize(
    ("instruction_set", "case"),
    [(row.pop("instruction_set"), PackedCase.of(**row)) for row in COMBINATIONS],
    ids=str,
)
def test_every_pair_of_settings_is_exact(instruction_set, case):
    with backends.instruction_set(instruction_set):
        check_problem(drawn_packed(case), packed)


@given(
    sequences=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), min_size=1, max_size=6),
    bias=st.sampled_from(list(FORMS)),
    heads=st.sampled_from([(1, 1), (4, 2)]),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 90),
    backend=st.sampled_from(["cpu", "reference"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_any_lengths_are_exact(sequences, bias, heads, causal, window, backend, seed):
    torch.manual_seed(seed)
    case = PackedCase.of(
        tuple(sequences), bias=bias, heads=heads, causal=causal, window=window, dims=(8, 8)
    )
    check_problem(drawn_packed(case), lambda problem: packed(problem, backend))


@pytest.mark.sanitize
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", FORMS)
def test_packed_sequences_equal_separate_calls_bit_for_bit(bias, causal):
    lengths = ((130, 130), (17, 40), (0, 3), (300, 200))
    case = PackedCase.of(lengths, bias=bias, heads=(4, 2), causal=causal)
    problem = drawn_packed(case)
    ours = evaluate(problem, packed)
    for (n_query, n_key), (own, i, j) in zip(lengths, problem.parts(), strict=True):
        rows = {"q": slice(i, i + n_query), "k": slice(j, j + n_key), "v": slice(j, j + n_key)}
        leaves = [getattr(problem, name)[:, :, at].detach() for name, at in rows.items()]
        for x in leaves:
            x.requires_grad_()
        bias_of_one = own if hasattr(own, "lower") or own is None else LoweredTo(own)
        o, lse = biased_flash_attn(
            *leaves, bias_of_one, causal=causal, return_lse=True, backend="cpu"
        )
        cotangents = (x[:, :, rows["q"]] for x in (problem.grad_o, problem.grad_lse))
        gradients = torch.autograd.grad((o, lse), leaves, tuple(cotangents))
        assert torch.equal(ours["o"][:, :, rows["q"]], o)
        assert torch.equal(ours["lse"][:, :, rows["q"]], lse)
        for (name, at), gradient in zip(rows.items(), gradients, strict=True):
            assert torch.equal(ours[f"gradient of {name}"][:, :, at], gradient), name


class LoweredTo:
    """A bias that is given by its form."""

    def __init__(self, form):
        self.form = form

    def lower(self, geometry, dtype, device):
        return self.form


@pytest.mark.parametrize("threads", [2, 5])
@pytest.mark.parametrize("bias", ["linear", "distance-shared", "cumulative-gain"])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1)], ids=lambda x: "{}x{}".format(*x))
def test_a_long_sequence_among_short_ones_is_split(heads, bias, threads):
    """Its heads are divided into tasks, whose sums are added in order."""
    torch.set_num_threads(threads)
    case = PackedCase.of(same(3, 900, 0, 40), bias=bias, heads=heads, dims=(32, 32))
    problem = drawn_packed(case)
    ours = check_problem(problem, packed)
    for name, again in evaluate(problem, packed).items():
        assert torch.equal(again, ours[name]), name


@pytest.mark.parametrize("bias", ["none", "cumulative", "cumulative-gain", "log1p_square"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_sequences_do_not_affect_each_other(backend, bias):
    """Including NaN, infinities, and steps so large that they would absorb later ones."""
    problem = drawn_packed(PackedCase.of(same(40, 50, 60), bias=bias))
    exact = evaluate(problem, lambda problem: packed(problem, backend))
    with torch.no_grad():
        for x in (problem.q, problem.k, problem.v, problem.grad_o):
            x[:, :, 45:50] = torch.nan
        if bias != "none":
            problem.bias.steps[..., 45:50] = -1e30
    others = [*range(40), *range(90, 150)]
    found = evaluate(problem, lambda problem: packed(problem, backend))
    for name, x in found.items():
        assert torch.equal(x[:, :, others], exact[name][:, :, others]), name
    assert found["o"][:, :, 45:50].isnan().all()


def test_gains_per_key_apply_to_the_last_queries():
    lengths = ((3, 7), (0, 2), (5, 5), (1, 9))
    case = PackedCase.of(lengths, bias="cumulative-gain", heads=(2, 2))
    problem = drawn_packed(case)
    of_keys = torch.rand(1, 2, case.lengths[1])
    firsts = zip(lengths, problem.parts(), strict=True)
    of_queries = [
        of_keys[..., j + n_key - n_query : j + n_key] for (n_query, n_key), (_, _, j) in firsts
    ]
    results = []
    for gain in (of_keys, torch.cat(of_queries, -1)):
        problem.bias.gain = torch.nn.Parameter(gain)
        results.append(packed(problem)[0])
    assert torch.equal(*results)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("bias", [None, biases.ALiBi(2), biases.Type1(2)])
@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0]])
def test_empty_inputs_give_empty_outputs(offsets, bias, backend):
    q = torch.randn(0, 2, 8, requires_grad=True)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    o, lse = biased_flash_attn_varlen(
        q, q, q, cu_seqlens, cu_seqlens, bias, return_lse=True, backend=backend
    )
    assert o.shape == (0, 2, 8)
    assert lse.shape == (2, 0)
    (gradient,) = torch.autograd.grad(o.sum() + lse.sum(), q)
    assert gradient.shape == q.shape


def test_outputs_have_the_layout_of_packed_tensors():
    q = torch.randn(20, 4, 8, requires_grad=True)
    k = torch.randn(20, 2, 8, requires_grad=True)
    v = torch.randn(20, 2, 6, requires_grad=True)
    cu_seqlens = torch.tensor([0, 5, 20], dtype=torch.int32)
    o = biased_flash_attn_varlen(q, k, v, cu_seqlens, cu_seqlens)
    assert o.shape == (20, 4, 6)
    assert all(x.is_contiguous() for x in (o, *torch.autograd.grad(o.sum(), (q, k, v))))
    o.view(20, 24)


@pytest.mark.parametrize("bias", FORMS)
def test_larger_maxima_do_not_change_results(bias):
    problem = drawn_packed(PackedCase.of(((9, 12), (30, 21)), bias=bias, causal=False))
    exact = evaluate(problem, packed)
    more = evaluate(problem, lambda problem: packed(problem, max_seqlen_q=39, max_seqlen_k=33))
    for name, x in exact.items():
        assert torch.equal(x, more[name]), name


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("name", ["linear", "linear-batch", "type2", "cumulative"])
def test_plans_of_sequences_equal_separate_plans(name, causal):
    lengths = ((1500, 1500), (40, 1100), (700, 700), (0, 1200), (1024, 1024))
    case = PackedCase.of(lengths, bias=name, dims=(32, 32), causal=causal)
    problem = drawn_packed(case)
    with torch.no_grad():
        if name == "cumulative":
            problem.bias.steps.abs_().neg_()
        elif name.startswith("linear"):
            problem.bias.slopes.copy_(0.2 + torch.rand(problem.bias.slopes.shape))
    offsets = case.offsets()
    plan = plan_of_packed(problem, offsets)
    skipped = 0
    for b, ((n_query, n_key), (own, i, j)) in enumerate(zip(lengths, problem.parts(), strict=True)):
        if n_query == 0:
            continue
        q = problem.q[:, :, i : i + n_query]
        k, v = (x[:, :, j : j + n_key] for x in (problem.k, problem.v))
        alone = plan_alone(q, k, v, own if hasattr(own, "lower") else LoweredTo(own), causal)
        tiles = (n_query + 127) // 128
        if alone is None:
            assert (plan[0, b, :, :tiles] == 0).all()
            assert (plan[1, b, :, :tiles] == n_key).all()
            continue
        assert torch.equal(plan[:, b, :, :tiles], alone[:, 0, :, :tiles])
        skipped += (alone[0] > 0).sum()
    assert skipped > 0
    o, _ = packed(problem, tolerance=0.0)
    ours, _ = packed(problem)
    assert (ours - o).abs().max() <= 2**-20 * problem.v.abs().max()


def plan_alone(q, k, v, bias, causal):
    return planned(prepared(q, k, v, bias, causal, None, None, None, "cpu")).plan


def plan_of_packed(problem, offsets):
    case = problem.case
    sequences = Sequences.from_offsets(*offsets, case.lengths, (None, None))
    call = prepared_call(problem, sequences=sequences)
    return planned(call).plan
