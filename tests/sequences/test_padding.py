"""Padded batches: tokens have the results of calls without padding, and padding has zeros."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biased_flash_attn import backends, biased_flash_attn, biases
from biased_flash_attn.attention import prepared
from biased_flash_attn.operators import planned
from tests.sequences.packed_cases import PaddedCase, drawn_padded, padded
from tests.support.biases import FORMS
from tests.support.cases import DTYPES, INSTRUCTION_SETS, pairwise
from tests.support.problems import check_problem, evaluate

COMBINATIONS = pairwise(
    bias=list(FORMS),
    dtype=DTYPES,
    lengths=[(70, 70), (150, 150), (1, 33), (20, 65), (65, 20)],
    padding=[((0, 3), (9, 0)), ((4, 5), (0, 0)), ((0, 20), (7, 6)), ((20, 0), (0, 19))],
    heads=[(1, 1), (4, 2), (3, 1)],
    causal=[True, False],
    window=[None, 1, 20, 500],
    layout=["contiguous", "heads_inside", "sliced", "shifted"],
    instruction_set=INSTRUCTION_SETS,
)


def case_of(row: dict) -> PaddedCase:
    """The case of a row, causal if lengths differ, since causal=False is refused then."""
    n_query, n_key = row["lengths"]
    return PaddedCase(**row | {"causal": row["causal"] or n_query != n_key})


SOME_EMPTY = pytest.mark.filterwarnings("ignore:key_padding_mask hides all tokens")


@SOME_EMPTY
@pytest.mark.parametrize(
    ("instruction_set", "case"),
    [(row.pop("instruction_set"), case_of(row)) for row in COMBINATIONS],
    ids=str,
)
def test_every_pair_of_settings_is_exact(instruction_set, case):
    with backends.instruction_set(instruction_set):
        check_problem(drawn_padded(case), padded)


@SOME_EMPTY
@given(
    length=st.integers(1, 120),
    data=st.data(),
    bias=st.sampled_from(list(FORMS)),
    causal=st.booleans(),
    backend=st.sampled_from(["cpu", "reference"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=50)
def test_any_padding_is_exact(length, data, bias, causal, backend, seed):
    torch.manual_seed(seed)
    n_query = data.draw(st.integers(1, 2 * length)) if causal else length
    before = data.draw(st.tuples(*2 * [st.integers(0, length)]))
    after = [data.draw(st.integers(0, length - n)) for n in before]
    padding = tuple(zip(before, after, strict=True))
    case = PaddedCase(bias, lengths=(n_query, length), padding=padding, causal=causal)
    check_problem(drawn_padded(case), lambda problem: padded(problem, backend))


@pytest.mark.sanitize
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
@pytest.mark.parametrize("bias", FORMS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_padding_does_not_affect_results(backend, bias, causal):
    case = PaddedCase(bias, lengths=(70, 70), padding=((7, 3), (0, 40)), causal=causal)
    problem = drawn_padded(case)

    def attend(problem):
        return padded(problem, backend)

    exact = evaluate(problem, attend)
    hidden = ~case.mask
    with torch.no_grad():
        for x in (problem.q, problem.k, problem.v, problem.grad_o, problem.grad_lse):
            x.transpose(1, 2)[hidden] = torch.nan
        of_tokens = () if problem.bias is None else problem.bias.named_parameters()
        for name, x in of_tokens:
            if name in ("steps", "gain") and x.shape[0] == case.batch:
                x.transpose(1, 2)[hidden] = torch.nan
    for name, x in evaluate(problem, attend).items():
        assert torch.equal(x, exact[name]), name
    for name in ("o", *map("gradient of {}".format, "qkv")):
        assert (exact[name].transpose(1, 2)[hidden] == 0).all(), name
    assert (exact["lse"].transpose(1, 2)[hidden] == -torch.inf).all()


@pytest.mark.parametrize(
    "bias", ["none", "linear", "kerple_log", "fire", "cable", "kernelized_cable"]
)
@pytest.mark.parametrize(("before", "after"), [(0, 9), (9, 0), (5, 4)])
def test_padding_does_not_move_tokens(bias, before, after):
    """Results are bit for bit those of the same tokens without padding."""
    case = PaddedCase(bias, lengths=(60, 60), padding=2 * ((before, after),))
    problem = drawn_padded(case)
    o, lse = padded(problem)
    tokens, own = slice(before, 60 - after), problem.called_bias()
    if isinstance(own, biases.CumulativeBias):
        gain = own.gain[..., tokens]
        own = biases.CumulativeBias(own.steps[..., tokens], gain, own.kernel)
    alone, alone_lse = biased_flash_attn(
        *(x[:, :, tokens] for x in (problem.q, problem.k, problem.v)),
        own,
        return_lse=True,
        backend="cpu",
    )
    assert torch.equal(o[:, :, tokens], alone)
    assert torch.equal(lse[:, :, tokens], alone_lse)


def test_masks_without_padding_do_not_change_results():
    """Except for float64 rounding: with a mask, prefix sums extend over all sequences."""
    case = PaddedCase("cumulative-gain", lengths=(33, 70), padding=((0, 0), (0, 0)))
    problem = drawn_padded(case)
    with_mask = evaluate(problem, padded)
    qkv = problem.q, problem.k, problem.v

    def without(problem):
        return biased_flash_attn(*qkv, problem.called_bias(), return_lse=True, backend="cpu")

    exact = {"rtol": 0, "atol": 0}
    reordered = {"rtol": torch.finfo(torch.float32).eps, "atol": 1e-12}
    for name, x in evaluate(problem, without).items():
        allowed = reordered if name == "gradient of steps" else exact
        torch.testing.assert_close(x, with_mask[name], **allowed, msg=name)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_plans_ignore_padding(causal):
    """NaN in padding would disable skipping."""
    case = PaddedCase(
        "type2", lengths=(1600, 1600), padding=((0, 300), (900, 0)), causal=causal, dims=(32, 32)
    )
    problem = drawn_padded(case)
    with torch.no_grad():
        for x in (problem.q, problem.k, problem.v):
            x.transpose(1, 2)[~case.mask] = torch.nan
    options = (case.causal, None, None, None, "cpu")
    call = prepared(
        problem.q, problem.k, problem.v, problem.bias, *options, key_padding_mask=case.mask
    )
    plan = planned(call).plan
    first = slice(0, 1300)
    rows = (x[:1, :, first] for x in (problem.q, problem.k, problem.v))
    alone = planned(prepared(*rows, problem.bias, *options)).plan
    assert torch.equal(plan[:, :1, :, : alone.shape[3]], alone)
    assert (alone[0] > 0).any()
    assert (plan[0, 1, :, :6] == 0).all()  # of 700 tokens
    o, everything = padded(problem)[0], padded(problem, tolerance=0.0)[0]
    largest = problem.v.abs().nan_to_num().max()
    assert (o - everything).abs().max() <= 2**-20 * largest


def test_sequences_without_tokens_are_empty():
    case = PaddedCase("linear", lengths=(20, 20), padding=((20, 0), (0, 0)))
    ours = evaluate(drawn_padded(case), padded)
    assert (ours["o"][0] == 0).all()
    assert (ours["lse"][0] == -torch.inf).all()
    assert all((ours[f"gradient of {name}"][0] == 0).all() for name in "qkv")
    assert ours["o"][1].abs().max() > 0


def test_inverted_masks_are_warned_of():
    q, k, v = torch.randn(3, 2, 1, 5, 8)
    for lengths in ((5, 3), (5, 5)):
        is_padding = torch.arange(5) >= torch.tensor(lengths)[:, None]
        with pytest.warns(UserWarning, match="^key_padding_mask hides all tokens") as warned:
            biased_flash_attn(q, k, v, key_padding_mask=is_padding)
        assert warned[0].filename == __file__


@pytest.mark.parametrize("lengths", [(5, 0), (3, 0), (5, 2)])
def test_masks_with_a_sequence_without_tokens_are_not_warned_of(lengths):
    q, k, v = torch.randn(3, 2, 1, 5, 8)
    is_token = torch.arange(5) < torch.tensor(lengths)[:, None]
    biased_flash_attn(q, k, v, key_padding_mask=is_token)


def test_a_single_sequence_may_be_padded():
    case = PaddedCase("cumulative", lengths=(50, 50), padding=((3, 10), (20, 0)))
    problem = drawn_padded(case)
    o, _ = padded(problem)
    with torch.no_grad():
        for b in range(2):
            alone = biased_flash_attn(
                *(x[b : b + 1] for x in (problem.q, problem.k, problem.v)),
                biases.CumulativeBias(problem.bias.steps[b : b + 1]),
                key_padding_mask=case.mask[b : b + 1],
            )
            assert torch.equal(alone, o[b : b + 1])


def test_decoding_allows_padding_before_the_tokens():
    """The results of one query in the last slot are the last row of the whole call."""
    case = PaddedCase("linear", lengths=(40, 40), padding=((0, 0), (25, 0)))
    problem = drawn_padded(case)
    whole, _ = padded(problem)
    problem.case = replace(case, lengths=(1, 40))
    problem.q = problem.q[:, :, -1:]
    assert torch.equal(padded(problem)[0], whole[:, :, -1:])
