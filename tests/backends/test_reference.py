"""The reference against attention written as scalar loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from biased_flash_attn.backends.reference import attention
from biased_flash_attn.forms import Geometry
from tests.support.biases import Dense
from tests.support.cases import Case
from tests.support.numerics import assert_close_to_float64
from tests.support.problems import Problem, magnitudes

NAN, INF = math.nan, math.inf


def loops(q, k, v, bias, geometry: Geometry, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of float64 tensors, one number at a time."""
    (n_batch, n_head, n_query, _), (_, n_kv_head, n_key, n_out) = q.shape, v.shape
    o = torch.zeros(n_batch, n_head, n_query, n_out, dtype=torch.float64)
    lse = torch.full((n_batch, n_head, n_query), -INF, dtype=torch.float64)
    q, k, v, bias = q.tolist(), k.tolist(), v.tolist(), bias.tolist()
    for b in range(n_batch):
        for h in range(n_head):
            kv = h // (n_head // n_kv_head)
            for i in range(n_query):
                p = i + n_key - n_query
                s = {}
                for j in range(n_key):
                    if (j > p and geometry.causal) or p - j >= (geometry.window or INF):
                        continue
                    dot = sum(x * y for x, y in zip(q[b][h][i], k[b][kv][j], strict=True))
                    s[j] = scale * dot + bias[b][h][i][j]
                if all(x == -INF for x in s.values()):
                    continue
                if any(math.isnan(x) or x == INF for x in s.values()):
                    o[b, h, i], lse[b, h, i] = NAN, NAN
                    continue
                top = max(s.values())
                weight = {j: math.exp(x - top) for j, x in s.items()}
                total = sum(weight.values())
                lse[b, h, i] = top + math.log(total)
                for c in range(n_out):
                    o[b, h, i, c] = sum(w * v[b][kv][j][c] for j, w in weight.items()) / total
    return o, lse


def drawn(n_query: int, n_key: int, *, n_head=2, n_kv_head=1, dim=3, n_out=2, dtype=torch.float64):
    """Random q, k, v and bias; one sequence."""
    q = torch.randn(1, n_head, n_query, dim)
    k = torch.randn(1, n_kv_head, n_key, dim)
    v = torch.randn(1, n_kv_head, n_key, n_out)
    bias = torch.randn(1, n_head, n_query, n_key)
    return [tensor.to(dtype).requires_grad_() for tensor in (q, k, v, bias)]


def sizes(inputs, geometry: Geometry, scale: float, grads=None) -> dict[str, Tensor]:
    """The sums of absolute terms of o, lse and, for their cotangents, gradients, if all arithmetic
    is in one dtype."""
    q, k, v, bias = inputs
    of_pairs = Dense(1)
    of_pairs.tensor = nn.Parameter(bias.detach())
    if grads is None:
        grads = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3])
    case = Case(
        lengths=(geometry.n_query, geometry.n_key),
        dims=(q.shape[3], v.shape[3]),
        heads=(q.shape[1], k.shape[1]),
        batch=len(q),
        causal=geometry.causal,
        window=geometry.window,
        scale=scale,
    )
    return magnitudes(Problem(case, q, k, v, of_pairs, *grads).double(), torch.float64)


def check(inputs, geometry: Geometry, scale: float = 0.7) -> tuple[Tensor, Tensor]:
    o, lse = attention(*inputs, geometry, scale)
    terms = sizes(inputs, geometry, scale)
    exact_o, exact_lse = loops(*inputs, geometry, scale)
    assert_close_to_float64(o, exact_o, None, "o", terms["o"])
    assert_close_to_float64(lse, exact_lse, None, "lse", terms["lse"])
    return o, lse


@given(
    n_query=st.integers(1, 6),
    n_key=st.integers(1, 6),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    dim=st.integers(1, 4),
    n_out=st.integers(1, 4),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 7),
    seed=st.integers(0, 2**32),
)
def test_attention_equals_the_loops(n_query, n_key, heads, dim, n_out, causal, window, seed):
    torch.manual_seed(seed)
    n_head, n_kv_head = heads
    inputs = drawn(n_query, n_key, n_head=n_head, n_kv_head=n_kv_head, dim=dim, n_out=n_out)
    check(inputs, Geometry(n_query, n_key, causal, window))


def test_bias_may_be_none_or_shared():
    q, k, v, bias = drawn(4, 4)
    shared = bias[:, :1]
    check((q, k, v, shared.expand_as(bias)), Geometry(4, 4))
    o, _ = attention(q, k, v, shared, Geometry(4, 4), 0.7)
    same, _ = attention(q, k, v, shared.expand_as(bias), Geometry(4, 4), 0.7)
    none, _ = attention(q, k, v, None, Geometry(4, 4), 0.7)
    zero, _ = attention(q, k, v, torch.zeros_like(bias), Geometry(4, 4), 0.7)
    assert torch.equal(o, same)
    assert torch.equal(none, zero)


@pytest.mark.parametrize(
    "geometry",
    [Geometry(4, 4), Geometry(2, 5, window=2), Geometry(5, 3), Geometry(3, 4, causal=False)],
    ids=["causal", "window", "empty-rows", "both-sides"],
)
def test_gradients_of_outputs_and_lse(geometry):
    inputs = drawn(geometry.n_query, geometry.n_key)

    def finite_outputs(*tensors):
        o, lse = attention(*tensors, geometry, 0.7)
        return o, lse[..., -min(geometry.n_query, geometry.n_key) :]

    assert torch.autograd.gradcheck(finite_outputs, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_is_as_exact_as_naive_softmax(dtype):
    geometry, scale = Geometry(40, 50, window=45), 0.5
    q, k, v, bias = drawn(40, 50, n_head=4, n_kv_head=4, dim=16, n_out=8, dtype=dtype)
    o, lse = attention(q, k, v, bias.double(), geometry, scale)
    assert o.dtype == dtype
    assert lse.dtype == torch.float32

    exact_o, exact_lse = attention(*(t.double() for t in (q, k, v, bias)), geometry, scale)
    s = (scale * (q @ k.mT) + bias).masked_fill(~geometry.visible(), -INF)
    largest = s.amax(-1, keepdim=True)  # without it, exponentials of float16 overflow
    p = torch.exp(s - largest)
    sums = p.sum(-1, keepdim=True)
    plain = {"o": p @ v / sums, "lse": (largest + sums.log())[..., 0].float()}
    terms = sizes((q, k, v, bias), geometry, scale)
    # Not only o is computed in dtype, but also the sum of weights, whose error is one of lse.
    terms["lse"] *= torch.finfo(dtype).eps / torch.finfo(lse.dtype).eps
    for name, actual, exact in (("o", o, exact_o), ("lse", lse, exact_lse)):
        assert_close_to_float64(actual, exact, plain[name], name, terms[name])


def test_rows_without_a_key_give_zeros():
    q, k, v, bias = drawn(5, 3)
    with torch.no_grad():
        bias[:, :, 3] = -INF
    o, lse = check((q, k, v, bias), Geometry(5, 3))
    empty = [0, 1, 3]
    assert (o[:, :, empty] == 0).all()
    assert (lse[:, :, empty] == -INF).all()

    grads = torch.autograd.grad(
        (o, lse), (q, k, v, bias), (torch.randn_like(o), torch.randn_like(lse))
    )
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :, empty] == 0).all()
    assert (grads[3][:, :, empty] == 0).all()


def test_rows_of_minus_infinity_ignore_the_values():
    q, k, v, bias = drawn(3, 3)
    with torch.no_grad():
        bias[:, :, 1], v[:, :, 1] = -INF, NAN
    o, lse = check((q, k, v, bias), Geometry(3, 3))
    assert (o[:, :, 1] == 0).all()
    dq, dv = torch.autograd.grad((o[:, :, :2].sum(), lse[:, :, 0].sum()), (q, v))
    assert (dq[:, :, 1] == 0).all()
    assert (dv[:, :, 1] == 0).all()


def test_cotangents_of_empty_rows_are_ignored():
    inputs = drawn(3, 2)
    o, lse = attention(*inputs, Geometry(3, 2), 0.7)
    to_o, to_lse = torch.zeros_like(o), torch.zeros_like(lse)
    to_o[:, :, 0], to_lse[:, :, 0] = 1, INF
    for grad in torch.autograd.grad((o, lse), inputs, (to_o, to_lse)):
        assert (grad == 0).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["q", "k", "v", "bias"])
def test_nonfinite_values_propagate_as_in_ieee_arithmetic(where, value):
    q, k, v, bias = drawn(6, 6, n_head=1)
    with torch.no_grad():
        {"q": q, "k": k, "v": v, "bias": bias}[where][0, 0, 3, 1] = value
    check((q, k, v, bias), Geometry(6, 6))
    check((q, k, v, bias), Geometry(6, 6, window=2))


def test_infinite_values_of_keys_without_weight_give_nan():
    q, k, v, bias = drawn(3, 3, n_head=1)
    with torch.no_grad():
        bias[..., 1], v[:, :, 1, 0] = -INF, INF
    o, _ = check((q, k, v, bias), Geometry(3, 3))
    assert o[0, 0, :, 0].isnan().tolist() == [False, True, True]


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_gradients_ignore_invisible_values(where, value):
    """With a window of 2, row 3 of q, k or v affects queries 3 and 4, and through them keys 2 to 4;
    the gradients of all others are unchanged."""
    geometry, n = Geometry(7, 7, window=2), 3
    clean = drawn(7, 7, n_head=1)
    poisoned = [tensor.detach().clone().requires_grad_() for tensor in clean]
    with torch.no_grad():
        poisoned["qkv".index(where)][:, :, n] = value
    cotangents = torch.randn(1, 1, 7, 2, dtype=torch.float64), torch.randn(1, 1, 7).double()

    def gradients(inputs):
        outputs = attention(*inputs, geometry, 0.7)
        return torch.autograd.grad(outputs, inputs, cotangents)

    affected = {"q": [n], "bias": [n]} if where == "q" else {"q": [n, n + 1], "bias": [n, n + 1]}
    affected["k"] = affected["v"] = [n - 1, n] if where == "q" else [n - 1, n, n + 1]
    terms = sizes(clean, geometry, 0.7, cotangents)
    terms["gradient of bias"] = terms.pop("gradient of tensor")
    grads = zip(["q", "k", "v", "bias"], gradients(poisoned), gradients(clean), strict=True)
    for name, *results in grads:
        what = f"gradient of {name}"
        others = [i for i in range(7) if i not in affected[name]]
        actual, exact, of_terms = (x[:, :, others] for x in (*results, terms[what]))
        assert_close_to_float64(actual, exact, None, what, of_terms)
