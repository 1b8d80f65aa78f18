"""Factors of a `relative` bias that are q or k themselves: their gradient is a part of that of q or
k, and no other tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from biased_flash_attn import (
    backends,
    biased_flash_attn,
    biased_flash_attn_varlen,
    biases,
    operators,
)
from biased_flash_attn.arguments import ATTENTION
from biased_flash_attn.attention import prepared
from biased_flash_attn.forms import Relative
from biased_flash_attn.forms.gradients import IN_K, IN_Q, OWN

HEADS, RANK = 4, 8
FIRST, EXTENT = -5, 9


class Scaled(torch.autograd.Function):
    """A view of a tensor, with another gradient than the tensor."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return -3 * grad


# Which tensors the factors of queries and keys are, given q and k.
FACTORS = {
    "the same": lambda q, k: (q, k),
    "q only": lambda q, k: (q, 2 * k),
    "exchanged": lambda q, k: (k, q),
    "one for both": lambda q, k: (q, q),
    "views": lambda q, k: (Scaled.apply(q), Scaled.apply(k)),
    "detached": lambda q, k: (q.detach(), k.detach()),
}


def drawn(n: int, dtype: torch.dtype, kv_heads: int = HEADS) -> list[Tensor]:
    """q, k, v and the tables, as leaves."""
    rows = [torch.randn(2, heads, n, RANK) for heads in (HEADS, kv_heads, kv_heads)]
    tables = [torch.randn(HEADS, RANK, EXTENT - FIRST) for _ in range(2)]
    return [x.to(dtype).requires_grad_() for x in (*rows, *tables)]


def results(tensors: list[Tensor], factors: str, grad_o: Tensor, **settings) -> tuple[Tensor, ...]:
    """o and the gradients of all tensors."""
    q, k, v, p, w = tensors
    u = FACTORS[factors](q, k)
    bias = biases.RelativeBias(u[0], p, u[1], w, first=FIRST, beyond="last")
    o = biased_flash_attn(q, k, v, bias, causal=False, tolerance=0.0, **settings)
    return o, *torch.autograd.grad(o, tensors, grad_o)


@pytest.mark.parametrize("n", [1, 17, 63, 130])
@pytest.mark.parametrize("factors", FACTORS)
def test_gradients_equal_those_of_the_reference(factors, n, seed):
    tensors = drawn(n, torch.float64)
    grad_o = torch.randn_like(tensors[0])
    found, expected = (
        results(tensors, factors, grad_o, backend=backend) for backend in ("cpu", "reference")
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("threads", [1, 5, 32])
def test_threads_that_share_a_head(threads, seed):
    """Each adds a part of the gradients of queries."""
    tensors = drawn(300, torch.float64)
    grad_o = torch.randn_like(tensors[0])
    expected = results(tensors, "the same", grad_o, backend="reference")
    torch.set_num_threads(threads)
    found = results(tensors, "the same", grad_o, backend="cpu")
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_are_as_exact_as_those_of_copies(dtype, seed):
    tensors = drawn(130, dtype)
    grad_o = torch.randn_like(tensors[0])
    wide = [x.detach().double().requires_grad_() for x in tensors]
    exact = results(wide, "the same", grad_o.double(), backend="reference")
    q, k, v, p, w = tensors
    bias = biases.RelativeBias(q.clone(), p, k.clone(), w, first=FIRST, beyond="last")
    o = biased_flash_attn(q, k, v, bias, causal=False, tolerance=0.0, backend="cpu")
    copies = o, *torch.autograd.grad(o, tensors, grad_o)
    found = results(tensors, "the same", grad_o, backend="cpu")
    for x, y, z in zip(found, copies, exact, strict=True):
        error, of_copies = ((a.double() - z).abs().max() for a in (x, y))
        assert error <= 1.5 * of_copies + torch.finfo(dtype).eps * z.abs().max()


def test_backends_may_return_gradients_of_their_own(monkeypatch, seed):
    """As those for GPUs do."""
    tensors = drawn(20, torch.float64)
    grad_o = torch.randn_like(tensors[0])
    expected = results(tensors, "the same", grad_o, backend="reference")
    backend = backends.get("cpu")
    backward = backend.backward

    def with_own(*call, targets):
        return backward(*call, targets=[OWN] * len(targets))

    monkeypatch.setattr(backend, "backward", with_own)
    found = results(tensors, "the same", grad_o, backend="cpu")
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_packed_and_padded_sequences(seed):
    tensors = drawn(40, torch.float64)
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[0, 31:], mask[1, :9] = False, False
    grad_o = torch.randn_like(tensors[0])
    found, expected = (
        results(tensors, "the same", grad_o, backend=backend, key_padding_mask=mask)
        for backend in ("cpu", "reference")
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)

    q, k, v = (torch.randn(60, HEADS, RANK).double().requires_grad_() for _ in range(3))
    offsets = torch.tensor([0, 3, 40, 60]).int()
    both = []
    for backend in ("cpu", "reference"):
        factors = (x.transpose(0, 1)[None] for x in (q, k))
        u, w = factors
        bias = biases.RelativeBias(u, tensors[3], w, tensors[4], first=FIRST, beyond="last")
        o = biased_flash_attn_varlen(
            q, k, v, offsets, offsets, bias=bias, causal=False, backend=backend
        )
        both.append((o, *torch.autograd.grad(o.square().sum(), (q, k, v, *tensors[3:]))))
    for x, y in zip(*both, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_targets():
    q, k = torch.randn(2, HEADS, 9, RANK), torch.randn(2, HEADS, 9, RANK)
    shared, table = k[:, :1], torch.randn(1, HEADS, RANK, 4)
    for u, w, keys, expected in (
        (q, k, k, (IN_Q, IN_K)),
        (q.view_as(q), k.detach(), k, (OWN, OWN)),
        # Gradients of keys are added before those of queries are written.
        (k, q, k, (OWN, OWN)),
        (q, shared, shared, (IN_Q, OWN)),
    ):
        targets = Relative(u, table, w, table).gradient_targets(q, keys)
        assert targets == [expected[0], OWN, expected[1], OWN]


def test_keys_of_several_heads(seed):
    tensors = drawn(33, torch.float64, kv_heads=1)
    grad_o = torch.randn_like(tensors[0])
    found, expected = (
        results(tensors, "the same", grad_o, backend=backend) for backend in ("cpu", "reference")
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_the_operator_returns_no_other_gradient(seed):
    q, k, v, p, w = (x.detach() for x in drawn(21, torch.float32))
    bias = biases.RelativeBias(q, p, k, w, first=FIRST, beyond="last")
    call = prepared(q, k, v, bias, False, None, None, 0.0, "cpu")
    targets = call.form.gradient_targets(call.q, call.k)
    assert targets == [IN_Q, OWN, IN_K, OWN]
    o, lse, *softmax = operators.forward(call)
    results = o, *softmax, torch.randn_like(o), torch.randn_like(lse), targets
    backward = torch.ops.biased_flash_attn.backward.default
    *_, of_form = backward(*results, *ATTENTION.flat(call))
    tables = call.form.tables
    assert [x.shape for x in of_form] == [(0,), tables[0].shape, (0,), tables[1].shape]
    torch.library.opcheck(backward, (*results, *ATTENTION.flat(call)))
