"""The transforms of torch.func, and batched gradients, against autograd for one entry at a time."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vjp, vmap

from biased_flash_attn import biased_flash_attn, biased_flash_attn_varlen, biases
from biased_flash_attn.attention import prepared as call_of
from biased_flash_attn.operators import planned
from tests.support import layers
from tests.support.biases import DENSE, FORMS, SHIPPED, Content
from tests.support.cases import Case
from tests.support.problems import drawn

BACKENDS = ["cpu", "reference"]
ENTRIES = 3
WITHOUT_PARAMETERS = {"none", "alibi", "sandwich", "smoothed_sandwich", "type1", "type2"}
WITHOUT_PARAMETERS |= {"inverse_distance", "inverse_log_distance"}


class Attention(nn.Module):
    def __init__(self, bias: nn.Module | None, backend: str):
        super().__init__()
        self.bias, self.backend = bias, backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        bias = self.bias() if isinstance(self.bias, Content) else self.bias
        return biased_flash_attn(q, k, v, bias, window=20, return_lse=True, backend=self.backend)


def prepared(bias: str, backend: str, **settings):
    """A function of q, k, v and the bias's parameters, by name, and random values of these."""
    settings = {"lengths": (17, 33), "heads": (4, 2), "dims": (8, 5), "batch": 2} | settings
    problem = drawn(Case(bias, **settings))
    module = Attention(problem.bias, backend)
    inputs = {name: x.detach() for name, x in problem.leaves().items() if name in ("q", "k", "v")}
    parameters = {name: x.detach() for name, x in module.named_parameters()}

    def loss(tensors: dict[str, Tensor]) -> Tensor:
        own = {name: tensors[name] for name in parameters}
        o, lse = functional_call(module, own, tuple(tensors[name] for name in inputs))
        return (o * problem.grad_o).sum() + (lse * problem.grad_lse).sum()

    return loss, inputs | parameters


def gradients(loss, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """By autograd."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    found = torch.autograd.grad(loss(leaves), leaves.values(), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def mapped(tensors: dict[str, Tensor], names) -> dict[str, Tensor]:
    """Other values for each entry of the tensors with these names."""
    scales = torch.linspace(0.5, 1, ENTRIES)
    return {
        name: torch.stack([scale * x for scale in scales]) if name in names else x
        for name, x in tensors.items()
    }


def entries(tensors: dict[str, Tensor], names):
    for n in range(ENTRIES):
        yield {name: x[n] if name in names else x for name, x in tensors.items()}


def dimensions(tensors: dict[str, Tensor], names) -> tuple[dict]:
    return ({name: 0 if name in names else None for name in tensors},)


def assert_close(found: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    for name, x in exact.items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", FORMS | SHIPPED | DENSE)
def test_gradients(bias, backend):
    loss, tensors = prepared(bias, backend)
    assert_close(grad(loss)(tensors), gradients(loss, tensors))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("bias", "of"),
    [
        (bias, of)
        for bias in FORMS | SHIPPED | DENSE
        for of in ("inputs", "parameters", "all")
        if of == "inputs" or bias not in WITHOUT_PARAMETERS
    ],
)
def test_gradients_of_each_entry(bias, of, backend):
    """Per-sample gradients, ensembles of parameters, and both."""
    loss, tensors = prepared(bias, backend)
    inputs = {"q", "k", "v"}
    names = {"inputs": inputs, "parameters": tensors.keys() - inputs, "all": tensors.keys()}[of]
    tensors = mapped(tensors, names)
    found = vmap(grad(loss), dimensions(tensors, names))(tensors)
    each = [gradients(loss, x) for x in entries(tensors, names)]
    assert_close(found, {name: torch.stack([x[name] for x in each]) for name in tensors})


@pytest.mark.parametrize("name", layers.MODULES)
def test_gradients_of_the_parameters_of_layers_for_each_entry(name):
    layer = layers.Attention(name)
    parameters = {name: x.detach() for name, x in layer.named_parameters()}
    states = torch.randn(ENTRIES, 1, 9, layers.CHANNELS)

    def loss(tensors: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, tensors, (x,)).square().sum()

    found = vmap(grad(loss), (None, 0))(parameters, states)
    each = [grad(loss)(parameters, x) for x in states]
    exact = [gradients(functools.partial(loss, x=x), parameters) for x in states]
    for n in range(ENTRIES):
        assert_close(each[n], exact[n])
        assert_close({name: x[n] for name, x in found.items()}, exact[n])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", FORMS)
def test_gradients_of_a_mapped_call(bias, backend):
    """As far as they are shared, they are sums over the entries."""
    loss, tensors = prepared(bias, backend)
    names = {"q", "v"}
    tensors = mapped(tensors, names)
    found = grad(lambda x: vmap(loss, dimensions(x, names))(x).sum())(tensors)
    each = [gradients(loss, x) for x in entries(tensors, names)]
    exact = {name: torch.stack([x[name] for x in each]) for name in tensors}
    assert_close(found, {n: x if n in names else x.sum(0) for n, x in exact.items()})


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_around_gradients_of_others(backend):
    """The outer gradient does not pass through the inner one, which has no derivatives."""
    loss, tensors = prepared("linear", backend)

    def outer(q: Tensor) -> Tensor:
        return vjp(loss, tensors | {"q": q})[0] * 2

    torch.testing.assert_close(grad(outer)(tensors["q"]), 2 * gradients(loss, tensors)["q"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", ["none", "distance", "cumulative-gain", "normalized", "relative"])
def test_jacobians(bias, backend):
    loss, tensors = prepared(bias, backend, lengths=(3, 5), heads=(2, 1), dims=(4, 3), batch=1)
    fixed = {name: x for name, x in tensors.items() if name != "q"}

    def attend(q: Tensor) -> Tensor:
        return biased_flash_attn(q, tensors["k"], tensors["v"], biases.ALiBi(2), backend=backend)

    found = jacrev(attend)(tensors["q"])
    exact = torch.autograd.functional.jacobian(attend, tensors["q"])
    torch.testing.assert_close(found, exact)
    of_loss = jacrev(lambda q: loss(fixed | {"q": q}))(tensors["q"])
    torch.testing.assert_close(of_loss, gradients(loss, tensors)["q"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", FORMS)
def test_batched_gradients(bias, backend):
    problem = drawn(Case(bias, lengths=(17, 33), heads=(4, 2)))
    module, leaves = Attention(problem.bias, backend), list(problem.leaves().values())
    results = module(problem.q, problem.k, problem.v)
    batched = [torch.randn(ENTRIES, *x.shape) for x in results]
    differentiate = functools.partial(
        torch.autograd.grad, results, leaves, retain_graph=True, allow_unused=True
    )
    found = differentiate(batched, is_grads_batched=True)
    each = [differentiate([x[n] for x in batched]) for n in range(ENTRIES)]
    for x, exact in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(exact), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nested_maps(backend):
    loss, tensors = prepared("cumulative", backend)
    twice = {name: torch.stack([x, x / 2]) for name, x in mapped(tensors, tensors).items()}
    found = vmap(vmap(grad(loss)))(twice)
    for m in range(2):
        for n in range(ENTRIES):
            one = {name: x[m, n] for name, x in twice.items()}
            assert_close({name: x[m, n] for name, x in found.items()}, gradients(loss, one))


@pytest.mark.parametrize("bias", ["alibi", "cable"])
def test_mapped_masks(bias):
    module, states = biases.ALiBi(2), torch.randn(ENTRIES, 2, 9, 3)
    if bias == "cable":
        module = biases.Cable(3, 2)
    q, k, v = torch.randn(3, ENTRIES, 2, 2, 9, 8)
    mask = torch.ones(ENTRIES, 2, 9, dtype=torch.bool)
    mask[0, 0, :3] = mask[1, 1, 7:] = False

    def attend(q, k, v, x, mask):
        given = module(x) if bias == "cable" else module
        return biased_flash_attn(q, k, v, given, key_padding_mask=mask)

    found = vmap(attend)(q, k, v, states, mask)
    each = [attend(*x) for x in zip(q, k, v, states, mask, strict=True)]
    torch.testing.assert_close(found, torch.stack(each))


def test_the_reference_refuses_mapped_masks():
    q, mask = torch.randn(ENTRIES, 1, 2, 9, 8), torch.ones(ENTRIES, 1, 9, dtype=torch.bool)

    def attend(q, mask):
        return biased_flash_attn(q, q, q, key_padding_mask=mask, backend="reference")

    with pytest.raises(ValueError, match=r"backend='reference' reads key_padding_mask .* vmap"):
        vmap(attend)(q, mask)


@pytest.mark.parametrize("backend", BACKENDS)
def test_mapped_packed_sequences(backend):
    cu_seqlens = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
    q, k, v = torch.randn(3, ENTRIES, 9, 2, 8)

    def loss(q, k, v):
        o = biased_flash_attn_varlen(
            q, k, v, cu_seqlens, cu_seqlens, biases.ALiBi(2), backend=backend
        )
        return o.square().sum()

    found = vmap(grad(loss, (0, 1, 2)))(q, k, v)
    each = [grad(loss, (0, 1, 2))(*x) for x in zip(q, k, v, strict=True)]
    for x, exact in zip(found, zip(*each, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(exact))


def test_mapped_offsets():
    """Of as many sequences, whose greatest lengths are given, as they cannot be read."""
    cu_seqlens = torch.tensor([[0, 4, 9], [0, 9, 9], [0, 1, 9]], dtype=torch.int32)
    tensors = torch.randn(3, ENTRIES, 9, 2, 8)
    attend = functools.partial(
        biased_flash_attn_varlen, bias=biases.ALiBi(2), max_seqlen_q=9, max_seqlen_k=9
    )
    found = vmap(attend)(*tensors, cu_seqlens, cu_seqlens)
    for n, offsets in enumerate(cu_seqlens):
        torch.testing.assert_close(found[n], attend(*tensors[:, n], offsets, offsets))


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_mapped_dimensions_of_any_place(dim):
    shape = [2, 2, 9, 8]
    shape.insert(dim, ENTRIES)
    tensors = torch.randn(3, *shape)
    attend = functools.partial(biased_flash_attn, bias=biases.ALiBi(2))
    found = vmap(attend, dim, dim)(*tensors)
    each = [attend(*(x.select(dim, n) for x in tensors)) for n in range(ENTRIES)]
    torch.testing.assert_close(found, torch.stack(each, dim))


def test_mapped_calls_skip_keys():
    """With plans of their own, which keep the results within the tolerance."""
    bias = biases.ALiBi(2)
    q, k, v = 0.1 * torch.randn(3, 2, 1, 2, 1500, 8)
    attend = functools.partial(biased_flash_attn, bias=bias)
    for x in zip(q, k, v, strict=True):
        plan = planned(call_of(*x, bias, True, None, None, None, "cpu")).plan
        assert (plan[0] > 0).any()
    exact = torch.stack([attend(*x, tolerance=0.0) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(vmap(attend)(q, k, v), exact)


@pytest.mark.parametrize("mapped", [False, True], ids=["single", "mapped"])
def test_second_derivatives_are_refused(mapped):
    q = torch.randn(2, 1, 2, 9, 8)

    def penalty(q: Tensor) -> Tensor:
        return grad(lambda q: biased_flash_attn(q, q, q).square().sum())(q).square().sum()

    run = vmap(grad(penalty)) if mapped else lambda q: grad(penalty)(q[0])
    with pytest.raises(RuntimeError, match="biased_flash_attn: the kernels have no second"):
        run(q)


def test_the_reference_has_second_derivatives():
    q = torch.randn(1, 2, 5, 4, dtype=torch.float64)

    def penalty(q: Tensor) -> Tensor:
        attend = functools.partial(biased_flash_attn, backend="reference")
        return grad(lambda q: attend(q, q, q).square().sum())(q).square().sum()

    assert torch.autograd.gradcheck(lambda q: grad(penalty)(q), q.requires_grad_())


@pytest.mark.slow
def test_compiled_transforms():
    torch._dynamo.reset()
    loss, tensors = prepared("distance", "cpu")
    compiled = torch.compile(grad(loss), fullgraph=True, backend="aot_eager")
    assert_close(compiled(tensors), gradients(loss, tensors))
