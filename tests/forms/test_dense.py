"""A bias with an independent number for each pair, on every backend and in every kind of call."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from biased_flash_attn import attention_plan, backends, biased_flash_attn, biases, operators
from biased_flash_attn.arguments import ATTENTION
from biased_flash_attn.compat import scaled_dot_product_attention
from biased_flash_attn.forms.gradients import OWN
from tests.decoding.cases import STORAGES, check_decoding, decoded, make_cache
from tests.sequences.packed_cases import PackedCase, drawn_packed, packed
from tests.support.biases import DENSE, Content
from tests.support.cases import DTYPES, INSTRUCTION_SETS, LAYOUTS, Case, pairwise
from tests.support.problems import check, check_problem, drawn, fused, prepared_call, with_leaves

COMBINATIONS = pairwise(
    bias=[*DENSE],
    dtype=DTYPES,
    lengths=[(1, 1), (70, 70), (64, 128), (3, 130), (131, 67), (0, 5)],
    dims=[(16, 16), (40, 8), (3, 70)],
    heads=[(1, 1), (4, 2), (3, 3)],
    causal=[True, False],
    window=[None, 1, 50],
    layout=[*LAYOUTS],
    trained=[True, False],
    instruction_set=INSTRUCTION_SETS,
)


@pytest.mark.parametrize("row", COMBINATIONS, ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_settings_is_exact(row):
    settings = dict(row)
    with backends.instruction_set(settings.pop("instruction_set")):
        check(Case(**settings))


@pytest.mark.parametrize("bias", DENSE)
def test_the_reference_is_exact(bias):
    check(Case(bias, heads=(4, 2), window=50), functools.partial(fused, backend="reference"))


@pytest.mark.parametrize("bias", ["dense-heads", "dense-shared"])
def test_packed_sequences_use_their_own_pairs(bias, backend):
    sequences = ((40, 70), (0, 3), (9, 9), (80, 20), (3, 0))
    case = PackedCase.of(sequences, bias=bias, heads=(4, 2), window=50)
    check_problem(drawn_packed(case), functools.partial(packed, backend=backend))


def strided(kind: str, tensor: torch.Tensor) -> torch.Tensor:
    if kind == "transposed":
        return tensor.mT.contiguous().mT
    if kind == "sliced":
        return torch.cat([tensor, torch.full_like(tensor, torch.nan)], -1)[..., : tensor.shape[-1]]
    if kind == "every other":
        return torch.stack([tensor, torch.full_like(tensor, torch.nan)], -1)[..., 0]
    return tensor[..., :1, :].expand_as(tensor)


@pytest.mark.parametrize("kind", ["transposed", "sliced", "every other", "equal rows"])
def test_gradients_have_the_dtype_of_strided_tensors(kind, drawn_dtype, backend):
    """Nothing outside the tensor is read."""
    problem = drawn(Case("dense", drawn_dtype, (70, 90), heads=(4, 2), window=60))
    dtype = random.choice([torch.float32, torch.bfloat16, torch.float16])
    tensor = strided(kind, torch.randn(2, 4, 70, 90).to(dtype))
    problem.bias.tensor = nn.Parameter(tensor)
    ours = check_problem(problem, functools.partial(fused, backend=backend))
    assert ours["gradient of tensor"].dtype == dtype


def test_infinities_hide_pairs_and_whole_rows(drawn_dtype, backend):
    problem = drawn(Case("dense-shared", drawn_dtype, (100, 100), causal=False))
    hidden = torch.rand(100, 100) < 0.5
    hidden[17], hidden[60, :64] = True, True
    with torch.no_grad():
        problem.bias.tensor.masked_fill_(hidden, -torch.inf)
    ours = check_problem(problem, functools.partial(fused, backend=backend))
    assert (ours["o"][:, :, 17] == 0).all()
    assert (ours["lse"][:, :, 17] == -torch.inf).all()
    assert (ours["gradient of tensor"][hidden] == 0).all()


class Visible(Content):
    """A boolean tensor: half of the pairs, and none of query 17."""

    def __init__(self, *shape: int):
        super().__init__()
        self.mask = torch.rand(shape) < 0.5
        self.mask[..., 17, :] = False

    def forward(self) -> biases.DenseBias:
        return biases.DenseBias(self.mask)


@pytest.mark.parametrize("shape", [(100, 100), (4, 100, 100), (2, 1, 100, 100)], ids=str)
def test_booleans_hide_pairs_and_whole_rows(shape, drawn_dtype, backend):
    problem = drawn(Case("none", drawn_dtype, (100, 100), heads=(4, 2), causal=False))
    problem.bias = Visible(*shape)
    dense = problem.bias().dense(100, 100)
    assert torch.equal(dense.exp(), problem.bias.mask.expand_as(dense).double())
    ours = check_problem(problem, functools.partial(fused, backend=backend))
    assert (ours["o"][:, :, 17] == 0).all()


def test_only_requested_gradients_are_computed(monkeypatch):
    q = torch.randn(1, 2, 70, 16, requires_grad=True)
    bias, given = biases.DenseBias(torch.randn(70, 70)), []
    backend = backends.get("cpu")
    backward = backend.backward

    def noted(problem, *results, targets):
        given.append(backward(problem, *results, targets=targets))
        return given[-1]

    monkeypatch.setattr(backend, "backward", noted)
    biased_flash_attn(q, q, q, bias).sum().backward()
    ((*_, of_form),) = given
    assert of_form == []


def test_opcheck():
    for case in (Case("dense", lengths=(9, 21), heads=(4, 2), window=15), Case("dense-shared")):
        problem = drawn(case)
        call = prepared_call(problem, tolerance=0.0).detached()
        registered = torch.ops.biased_flash_attn
        torch.library.opcheck(registered.forward.default, ATTENTION.flat(with_leaves(call)))
        o, _, *softmax = operators.forward(call)
        results = o, *softmax, problem.grad_o, problem.grad_lse, [OWN]
        torch.library.opcheck(registered.backward.default, (*results, *ATTENTION.flat(call)))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("bias", ["dense", "dense-heads", "dense-shared"])
def test_decoding_steps_use_their_rows(bias, window, backend):
    problem = drawn(Case(bias, lengths=(150, 150), heads=(4, 2), window=window))
    cache = make_cache(problem, random.choice(STORAGES))
    check_decoding(problem, *decoded(problem, cache, (70, 1, 3, 40), backend))


def test_keys_are_never_skipped():
    q = torch.randn(1, 2, 1100, 8)
    plan = attention_plan(q, q, biases.DenseBias(-100 * torch.ones(1100, 1100).tril(-50)))
    assert (plan.fraction == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(70, 50), (4, 70, 50), (2, 1, 70, 50), (1, 4, 1, 50), (50,)])
def test_float_masks_are_added_as_in_pytorch(shape, dtype):
    q, k = torch.randn(2, 4, 70, 16).to(dtype), torch.randn(2, 4, 50, 16).to(dtype)
    mask = torch.randn(shape).to(dtype).requires_grad_()
    ours, exact = (
        call(q, k, k, attn_mask=mask, scale=0.3)
        for call in (scaled_dot_product_attention, functional.scaled_dot_product_attention)
    )
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(ours, exact, **tolerance)
    grads = [torch.autograd.grad(o.float().square().sum(), mask)[0] for o in (ours, exact)]
    torch.testing.assert_close(*grads, rtol=5e-2, atol=5e-2 * grads[1].abs().max().item())


@pytest.mark.parametrize("lengths", [(50, 50), (30, 50), (50, 30)], ids=str)
def test_float_masks_combine_with_is_causal(lengths):
    q, k = torch.randn(3, 2, 4, lengths[0], 16), torch.randn(3, 2, 4, lengths[1], 16)
    mask = torch.randn(2, 1, *lengths)
    ours = scaled_dot_product_attention(q, k, k, attn_mask=mask, is_causal=True)
    hidden = torch.ones(lengths, dtype=torch.bool).triu(1)
    mask = mask.masked_fill(hidden, -torch.inf)
    exact = functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("shape", [(70, 50), (4, 1, 50), (2, 1, 70, 50), (2, 4, 70, 1)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_boolean_masks_of_pairs_are_those_of_pytorch(shape, is_causal):
    q, k = torch.randn(2, 4, 70, 16), torch.randn(2, 4, 50, 16)
    mask = torch.rand(shape) < 0.8
    ours = scaled_dot_product_attention(q, k, k, mask, is_causal=is_causal)
    earlier = torch.ones(70, 50, dtype=torch.bool).tril() if is_causal else True
    exact = functional.scaled_dot_product_attention(q, k, k, mask & earlier)
    torch.testing.assert_close(ours, exact)


def test_undefined_values_propagate_to_their_queries(backend):
    q, tensor = torch.randn(1, 2, 70, 16), torch.randn(70, 70)
    tensor[40, 3] = tensor[5, 60] = torch.nan  # the latter is not visible
    o = biased_flash_attn(q, q, q, biases.DenseBias(tensor), backend=backend)
    assert torch.equal(o.isnan().all(-1)[0, 0], torch.arange(70) == 40)
    assert torch.equal(o.isnan().any(-1)[0, 0], torch.arange(70) == 40)


WRONG = {
    "no tensor": (TypeError, "tensor must be a floating point or bool tensor, not int", 3),
    "ints": (TypeError, "tensor must be a floating point or bool tensor", torch.ones(5, 5).int()),
    "one dimension": (ValueError, r"tensor has shape \(5,\)", torch.ones(5)),
    "other keys": (ValueError, r"bias was lowered to shape \(1, 1, 5, 6\)", torch.ones(5, 6)),
    "other heads": (ValueError, "bias has head count 3", torch.ones(3, 5, 5)),
    "other batch": (ValueError, "bias has batch 3", torch.ones(3, 1, 5, 5)),
    "other device": (ValueError, "bias is on meta", torch.ones(5, 5, device="meta")),
}


@pytest.mark.parametrize(("error", "message", "tensor"), WRONG.values(), ids=WRONG)
def test_invalid_tensors_raise(error, message, tensor):
    q = torch.randn(2, 2, 5, 8)
    with pytest.raises(error, match=message):
        biased_flash_attn(q, q, q, biases.DenseBias(tensor))


def test_error_for_tensors_names_the_remedy():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(TypeError, match=r"bias is a Tensor; .* such as DenseBias\(bias\)"):
        biased_flash_attn(q, q, q, torch.zeros(5, 5))
