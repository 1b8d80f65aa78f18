"""The operators under opcheck, compilation, autocast and second derivatives."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from biased_flash_attn import biased_flash_attn, biased_flash_attn_varlen, biases, operators
from biased_flash_attn.arguments import ATTENTION
from biased_flash_attn.attention import lowered
from biased_flash_attn.forms.gradients import OWN
from biased_flash_attn.problem import Problem
from biased_flash_attn.sequences import Sequences
from tests.sequences.packed_cases import PackedCase, PaddedCase, drawn_packed, drawn_padded, padded
from tests.support.biases import FORMS, Content
from tests.support.cases import Case
from tests.support.problems import drawn, prepared_call, with_leaves

# Importing the default backend of torch.compile raises a warning of PyTorch's own.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
OPERATORS = torch.ops.biased_flash_attn


def call_of(case: Case):
    """The drawn problem, and the call as passed to the operators."""
    problem = drawn(case)
    form = lowered(problem.called_bias(), problem.q, case.geometry)
    operands = problem.q, problem.k, problem.v, form, case.geometry
    return problem, Problem(*operands, problem.scale, 0.0, "cpu").detached()


def own_targets(call: Problem) -> list[int]:
    return [OWN] * len(call.form.tensors)


@pytest.mark.parametrize("bias", FORMS)
def test_opcheck_of_forward(bias):
    _, call = call_of(Case(bias, lengths=(9, 21), heads=(4, 2), window=15))
    torch.library.opcheck(OPERATORS.forward.default, ATTENTION.flat(with_leaves(call)))


@pytest.mark.parametrize("form_gradient", [True, False])
@pytest.mark.parametrize("bias", FORMS)
def test_opcheck_of_backward(bias, form_gradient):
    problem, call = call_of(Case(bias, lengths=(9, 21), heads=(4, 2)))
    targets = own_targets(call) if form_gradient else []
    o, _, *softmax = operators.forward(call)
    results = o, *softmax, problem.grad_o, problem.grad_lse, targets
    torch.library.opcheck(OPERATORS.backward.default, (*results, *ATTENTION.flat(call)))


@pytest.mark.parametrize("bias", FORMS)
def test_opcheck_with_sequences(bias):
    case = PackedCase.of(((9, 21), (0, 3), (4, 4)), bias=bias, heads=(4, 2), window=15)
    problem = drawn_packed(case)
    sequences = Sequences.from_offsets(*case.offsets(), case.lengths, (None, None))
    call = prepared_call(problem, tolerance=0.0, sequences=sequences).detached()
    torch.library.opcheck(OPERATORS.forward.default, ATTENTION.flat(with_leaves(call)))
    o, _, *softmax = operators.forward(call)
    results = o, *softmax, problem.grad_o, problem.grad_lse, own_targets(call)
    torch.library.opcheck(OPERATORS.backward.default, (*results, *ATTENTION.flat(call)))
    if bias != "none":
        torch.library.opcheck(OPERATORS.plan.default, ATTENTION.flat(call))


def test_opcheck_of_sequence_ranges():
    offsets = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
    operators = torch.ops.biased_flash_attn
    for longest in ((None, None), (6, 7)):
        arguments = (offsets, offsets, 9, 9, *longest)
        torch.library.opcheck(operators.rows_of_offsets.default, arguments)
    mask = torch.tensor([[True, True, False], [False, True, True], 3 * [False]])
    torch.library.opcheck(operators.rows_of_mask.default, (mask, 2, "mask"))
    steps = torch.randn(1, 2, 9, dtype=torch.float64, requires_grad=True)
    for reverse in (False, True):
        torch.library.opcheck(
            operators.prefix_sums.default, (steps, offsets.diff().long(), reverse)
        )


def test_prefix_sums_restart_in_each_sequence():
    lengths, steps = torch.tensor([3, 0, 5, 1]), torch.randn(2, 9).double().requires_grad_()
    sums = torch.ops.biased_flash_attn.prefix_sums
    exact = torch.cat([x.cumsum(-1) for x in steps.split(lengths.tolist(), -1)], -1)
    assert torch.equal(sums(steps, lengths, False), exact)
    for reverse in (False, True):
        assert torch.autograd.gradcheck(lambda x, r=reverse: sums(x, lengths, r), steps)
        assert torch.autograd.gradgradcheck(lambda x, r=reverse: sums(x, lengths, r), steps)


class Packed(nn.Module):
    """Attention over packed sequences of any lengths, with one bias."""

    def __init__(self, bias: nn.Module | None):
        super().__init__()
        self.bias = bias

    def forward(self, q, k, v, offsets, **longest):
        bias = self.bias() if isinstance(self.bias, Content) else self.bias
        o, lse = biased_flash_attn_varlen(
            q, k, v, offsets, offsets, bias, window=20, return_lse=True, **longest
        )
        return o.square().sum() + lse.sum()


@pytest.mark.parametrize("longest", [{}, {"max_seqlen_q": 30, "max_seqlen_k": 30}], ids=str)
@pytest.mark.parametrize("name", ["none", "cumulative-gain", "linear", "kerple_log", "cable"])
def test_packed_calls_compile_without_graph_breaks(name, longest):
    torch._dynamo.reset()
    case = PackedCase.of(((5, 5), (0, 0), (30, 30), (8, 8)), bias=name, heads=(4, 2))
    problem = drawn_packed(case)
    layer = Packed(problem.bias)
    leaves = [
        x[0].transpose(0, 1).detach().requires_grad_() for x in (problem.q, problem.k, problem.v)
    ]
    offsets = case.offsets()[0]
    wanted = (*leaves, *layer.parameters())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for run in (layer, compiled):
        loss = run(*leaves, offsets, **longest)
        results.append((loss, *torch.autograd.grad(loss, wanted)))
    for exact, x in zip(*results, strict=True):
        torch.testing.assert_close(x, exact)


def test_compiled_calls_check_offsets():
    torch._dynamo.reset()
    q = torch.randn(9, 2, 8)
    compiled = torch.compile(Packed(None), fullgraph=True, backend="aot_eager")
    compiled(q, q, q, torch.tensor([0, 4, 9], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"^cu_seqlens_q falls from 4 to 3 at 2"):
        compiled(q, q, q, torch.tensor([0, 4, 3], dtype=torch.int32))


@pytest.mark.parametrize("name", ["none", "cumulative-gain", "alibi"])
def test_padded_calls_compile_without_graph_breaks(name):
    torch._dynamo.reset()
    case = PaddedCase(name, lengths=(33, 33), heads=(4, 2), padding=((3, 0), (0, 20)))
    problem = drawn_padded(case)
    leaves = list(problem.leaves().values())

    def attend(problem):
        o, lse = padded(problem, backend=None)
        return o.square().sum() + lse.nan_to_num(neginf=0.0).sum()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    results = []
    for run in (attend, compiled):
        loss = run(problem)
        results.append((loss, *torch.autograd.grad(loss, leaves)))
    for exact, x in zip(*results, strict=True):
        torch.testing.assert_close(x, exact)


class Layer(nn.Module):
    """Attention with a bias whose computation is visible to the compiler."""

    def __init__(self, bias: nn.Module | None):
        super().__init__()
        self.bias = bias

    def forward(self, q, k, v):
        bias = self.bias() if isinstance(self.bias, Content) else self.bias
        o, lse = biased_flash_attn(q, k, v, bias, window=20, return_lse=True)
        return o.square().sum() + lse.sum()


def loss_and_gradients(layer, q, k, v):
    loss = layer(q, k, v)
    return loss, *torch.autograd.grad(loss, (q, k, v, *layer.parameters()))


NAMES = [
    "none",
    "cumulative-gain",
    "log1p_square",
    "alibi",
    "kerple_log",
    "sandwich",
    "t5",
    "cable",
]


@pytest.mark.parametrize("name", NAMES)
def test_compiles_without_graph_breaks(name):
    torch._dynamo.reset()
    problem = drawn(Case(name, lengths=(33, 33), heads=(4, 2)))
    layer = Layer(problem.bias)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for exact, x in zip(
        loss_and_gradients(layer, problem.q, problem.k, problem.v),
        loss_and_gradients(compiled, problem.q, problem.k, problem.v),
        strict=True,
    ):
        torch.testing.assert_close(x, exact)


@pytest.mark.parametrize("name", ["none", "alibi", "kerple_log", "cable", "forget_gate"])
def test_meta_tensors_give_shapes(name):
    def shapes(device: str) -> list:
        q, k, v = (
            torch.randn(2, *shape, device=device, requires_grad=True)
            for shape in ((4, 6, 8), (2, 9, 8), (2, 9, 5))
        )
        inputs, bias = [q, k, v], None
        if name in biases.DISTANCE_BIASES:
            bias = biases.DISTANCE_BIASES[name](4).to(device)
        elif name in biases.CONTEXT_BIASES:
            module = biases.CONTEXT_BIASES[name](3, 4).to(device)
            inputs += module.parameters()
            bias = module(torch.randn(2, 9, 3, device=device))
        mask = torch.ones(2, 9, dtype=torch.bool, device=device)
        masks = [None] if name in biases.CONTEXT_BIASES else [None, mask]
        results = []
        for mask in masks:
            o, lse = biased_flash_attn(q, k, v, bias, key_padding_mask=mask, return_lse=True)
            gradients = torch.autograd.grad(o.sum() + lse.sum(), inputs, retain_graph=True)
            results += [o, lse, *gradients]
        assert {x.device.type for x in results} == {device}
        return [(x.shape, x.dtype, x.stride()) for x in results]

    assert shapes("meta") == shapes("cpu")


@pytest.mark.parametrize("longest", [None, 9])
def test_packed_meta_tensors_give_shapes(longest):
    q, kv = torch.empty(20, 4, 8, device="meta"), torch.empty(30, 2, 8, device="meta")
    cu_seqlens = torch.empty(3, dtype=torch.int32, device="meta")
    o, lse = biased_flash_attn_varlen(
        q,
        kv,
        kv,
        cu_seqlens,
        cu_seqlens,
        biases.Type1(4),
        **{"max_seqlen_q": longest, "max_seqlen_k": longest, "return_lse": True},
    )
    assert o.shape == q.shape
    assert lse.shape == (4, 20)


def test_biases_may_be_constructed_in_compiled_code():
    torch._dynamo.reset()

    def attend(q):
        return biased_flash_attn(q, q, q, biases.ALiBi(q.shape[1], shift=1.0))

    q = torch.randn(1, 3, 33, 8)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), attend(q))


@pytest.mark.slow
def test_compiles_with_the_default_backend(monkeypatch, tmp_path):
    """With a cache of its own: the usual one may have code of another version of the package."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    problem = drawn(Case("kerple_log", lengths=(33, 33), heads=(4, 2)))
    layer = Layer(problem.bias)
    for exact, x in zip(
        loss_and_gradients(layer, problem.q, problem.k, problem.v),
        loss_and_gradients(torch.compile(layer, fullgraph=True), problem.q, problem.k, problem.v),
        strict=True,
    ):
        torch.testing.assert_close(x, exact, rtol=1e-4, atol=1e-4)


def test_lengths_need_no_recompilation():
    torch._dynamo.reset()
    layer = Layer(biases.KerpleLog(2))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (21, 34, 55):
            q, k, v = (torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3))
            ours, exact = (loss_and_gradients(run, q, k, v) for run in (compiled, layer))
            torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("name", ["kerple_log", "cable"])
def test_autocast_casts_only_the_inputs(name):
    problem = drawn(Case(name, lengths=(33, 33)))
    q, k, v = problem.q, problem.k, problem.v
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = biased_flash_attn(q, k, v, problem.called_bias())
    cast = biased_flash_attn(q.bfloat16(), k.bfloat16(), v.bfloat16(), problem.called_bias())
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, cast)
    ours.sum().backward()
    assert q.grad.dtype == torch.float32


def test_second_derivatives_are_refused():
    problem = drawn(Case("linear"))
    o = biased_flash_attn(problem.q, problem.k, problem.v, problem.bias)
    (grad_q,) = torch.autograd.grad(o.square().sum(), problem.q, create_graph=True)
    with pytest.raises(RuntimeError, match="biased_flash_attn: the kernels have no second"):
        grad_q.sum().backward()


def test_the_reference_has_second_derivatives():
    problem = drawn(Case("linear", torch.float64, lengths=(5, 5), dims=(3, 3), batch=1))

    def attend(q, k):
        return biased_flash_attn(q, k, problem.v, problem.bias, backend="reference")

    assert torch.autograd.gradgradcheck(attend, (problem.q, problem.k))


def test_inference_mode():
    problem = drawn(Case("kerple_log"))
    exact = biased_flash_attn(problem.q, problem.k, problem.v, problem.bias)
    with torch.inference_mode():
        ours = biased_flash_attn(problem.q, problem.k, problem.v, problem.bias)
    assert torch.equal(ours, exact)
    assert ours.is_inference()


def test_forward_mode_derivatives_are_refused():
    problem = drawn(Case("linear"))
    q, k, v = problem.q.detach(), problem.k.detach(), problem.v.detach()
    bias = biases.ALiBi(2)
    with pytest.raises(NotImplementedError, match="the kernels have no forward-mode derivatives"):
        torch.func.jvp(lambda q: biased_flash_attn(q, k, v, bias), (q,), (q,))
    derivatives = [
        torch.func.jvp(
            lambda q: biased_flash_attn(q, k, v, bias, backend="reference"), (q,), (tangent,)
        )[1]
        for tangent in (q, 2 * q)
    ]
    torch.testing.assert_close(2 * derivatives[0], derivatives[1])
    assert derivatives[0].abs().max() > 0


def test_scale_and_window_need_no_recompilation():
    torch._dynamo.reset()
    q = torch.randn(1, 2, 33, 8)

    def attend(scale, window):
        return biased_flash_attn(q, q, q, scale=scale, window=window)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for scale, window in ((0.3, 2), (0.4, 3), (0.5, 100)):
        torch.testing.assert_close(compiled(scale, window), attend(scale, window))


@pytest.mark.parametrize("name", ["alibi", "sandwich"])
def test_tracing_does_not_change_fixed_biases(name):
    bias, q = biases.DISTANCE_BIASES[name](2), torch.randn(1, 2, 33, 8)

    def attend(bias, q):
        return biased_flash_attn(q, q, q, bias)

    exact = biased_flash_attn(q, q, q, bias)
    for module in (bias, biases.DISTANCE_BIASES[name](2)):
        traced = make_fx(functools.partial(attend, module), tracing_mode="fake")
        assert torch.equal(traced(q)(q), exact)
        assert torch.equal(biased_flash_attn(q, q, q, module), exact)
