"""The meaning of products of a vector per query, or per key, and a vector per distance."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from biased_flash_attn import biases, forms
from biased_flash_attn.forms import Geometry
from tests.forms.relative_cases import REFERENCE, TERMS, by_definition, drawn, leaves, one_of


def attended(q, k, v, bias, geometry: Geometry) -> Tensor:
    """Attention with the definition of the bias, by autograd."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q.shape[-1] ** -0.5 * q @ k.mT + by_definition(bias, geometry.n_query, geometry.n_key)
    p = s.masked_fill(~geometry.visible(), -torch.inf).softmax(-1)
    return p.nan_to_num() @ v


CASES = {
    "one key": (1, 1, {"extent": 1}),
    "band": (9, 9, {"extent": 4}),
    "extent 1": (7, 9, {"extent": 1, "rank": 1}),
    "extent beyond the keys": (5, 7, {"extent": 30, "rank": 16}),
    "two-sided": (9, 9, {"first": -3, "extent": 6}),
    "mostly ahead": (8, 8, {"first": -7, "extent": 2}),
    "only ahead": (6, 6, {"first": -5, "extent": -1}),
    "not from 0 on": (8, 9, {"first": 2, "extent": 6}),
    "wide": (5, 5, {"rank": 64, "extent": 4, "first": -2}),
    "widest": (4, 5, {"rank": 128, "extent": 3}),
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("beyond", ["zero", "last"])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("name", CASES)
def test_attention_and_gradients_are_those_of_the_definition(name, terms, beyond, causal):
    n_query, n_key, settings = CASES[name]
    geometry = Geometry(n_query, n_key, causal, one_of(None, 3))
    bias = drawn(geometry, terms=terms, beyond=beyond, **settings)
    q = torch.randn(2, 2, n_query, 4).double().requires_grad_()
    k, v = (torch.randn(2, 1, n_key, 4).double().requires_grad_() for _ in range(2))
    named = {"q": q, "k": k, "v": v, **leaves(bias)}
    grad_o, results = torch.randn(2, 2, n_query, 4).double(), []
    for o in (
        REFERENCE(q, k, v, bias, causal=causal, window=geometry.window),
        attended(q, k, v, bias, geometry),
    ):
        grads = torch.autograd.grad(o, named.values(), grad_o, materialize_grads=True)
        results.append((o, *grads))
    for what, ours, exact in zip(("o", *named), *results, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11, msg=what)


@pytest.mark.parametrize("beyond", ["zero", "last"])
@pytest.mark.parametrize("first", [0, -3])
def test_dense_equals_the_definition_without_a_mask(first, beyond):
    bias = drawn(Geometry(6, 8), first=first, beyond=beyond, extent=4)
    torch.testing.assert_close(bias.dense(6, 8), by_definition(bias, 6, 8))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("beyond", ["zero", "last"])
def test_finite_differences(beyond, causal):
    bias = drawn(Geometry(5, 6), extent=3, first=-2, beyond=beyond, batch=1, rank=2)
    q, k, v = (torch.randn(1, 2, n, 3).double() for n in (5, 6, 6))

    def attend(*tensors):
        own = dict(zip(leaves(bias), tensors, strict=True))
        return REFERENCE(
            q,
            k,
            v,
            biases.RelativeBias(**own, first=-2, beyond=beyond),
            causal=causal,
            return_lse=True,
        )

    assert torch.autograd.gradcheck(attend, [*leaves(bias).values()])


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("causal", [True, False])
def test_functions_of_the_distance_cover_all_distances(causal, terms):
    geometry = Geometry(5, 8, causal)
    bias = drawn(geometry, first=-10, extent=11, terms=terms)

    def lookup(x: Tensor):
        return lambda d: x[..., d.long() + 10]

    given = {name: lookup(x) if "tables" in name else x for name, x in leaves(bias).items()}
    ours = biases.RelativeBias(**given)
    q, k = torch.randn(2, 2, 5, 4).double(), torch.randn(2, 2, 8, 4).double()
    results = [REFERENCE(q, k, k, b, causal=causal) for b in (ours, bias)]
    torch.testing.assert_close(*results)


def test_heads_may_share_everything_but_one_tensor():
    u, p = torch.randn(1, 1, 7, 3), torch.randn(4, 3, 5)
    q, k = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8)
    shared = REFERENCE(q, k, k, biases.RelativeBias(u, p))
    full = biases.RelativeBias(u.expand(2, 4, -1, -1), p)
    torch.testing.assert_close(shared, REFERENCE(q, k, k, full))


def test_forms_can_be_rebuilt_from_name_and_tensors():
    for beyond, terms in itertools.product(("zero", "last"), TERMS):
        geometry = Geometry(5, 6, one_of(True, False))
        form = drawn(geometry, beyond=beyond, terms=terms).lower(geometry, torch.float64, None)
        again = forms.from_tensors(form.name, form.tensors)
        assert len(form.tensors) == 4
        assert torch.equal(again.dense(geometry), form.dense(geometry))


HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("real", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("factors", "tables", "kept"),
    [
        *((half, half, half) for half in HALVES),
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float64, torch.float32),
        (torch.float32, torch.float32, torch.float32),
    ],
)
def test_half_precision_is_kept_if_all_tensors_have_it(factors, tables, kept, real):
    u, p = torch.randn(1, 2, 5, 3).to(factors), torch.randn(2, 3, 4).to(tables)
    geometry = Geometry(5, 5)
    form = biases.RelativeBias(u, p).lower(geometry, real, None)
    assert {x.dtype for x in form.tensors} == {real if real == torch.float64 else kept}
    expected = {layout.dtype for layout in form.layouts(geometry, real)}
    assert expected == {x.dtype for x in form.tensors}
    wide = biases.RelativeBias(u, p).lower(geometry, torch.float32, None)
    assert {x.dtype for x in wide.layouts(geometry, torch.float64)} == {torch.float64}
    made = form.accumulators(1, 1, 2)
    assert {made[0].dtype, made[1].dtype} == expected
    made = form.accumulators(3, 3, 4)  # to be summed over the batch and the heads
    assert {x.dtype for x in made} == {torch.promote_types(real, torch.float32)}
    q = torch.randn(1, 2, 5, 8).to(torch.float64 if real == torch.float64 else torch.bfloat16)
    assert REFERENCE(q, q, q, biases.RelativeBias(u, p)).dtype == q.dtype


def test_products_of_half_precision_are_exact():
    u = torch.randn(1, 2, 5, 3).bfloat16().requires_grad_()
    p = torch.randn(2, 3, 4).bfloat16().requires_grad_()
    q = torch.randn(1, 2, 5, 8)
    o = REFERENCE(q, q, q, biases.RelativeBias(u, p))
    wide = REFERENCE(q, q, q, biases.RelativeBias(u.float(), p.float()))
    assert torch.equal(o, wide)
    assert [x.dtype for x in torch.autograd.grad(o.sum(), (u, p))] == [torch.bfloat16] * 2


def test_accumulators_sum_to_the_tensors():
    geometry = Geometry(5, 6)
    form = drawn(geometry, batch=1).lower(geometry, torch.float32, None)
    made = form.accumulators(3, 1, 2)
    for x, own in zip(made, form.tensors, strict=True):
        assert x.sum_to_size(own.shape).shape == own.shape
        assert x.shape[1] == 2
    assert [len(x) for x in made] == [3, 1, 3, 1]  # kernels sum tables over the batch
