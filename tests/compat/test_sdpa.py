"""compat.scaled_dot_product_attention equals PyTorch's, with a bias instead of a dense mask."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from biased_flash_attn import biases
from biased_flash_attn.compat import scaled_dot_product_attention
from tests.support.biases import FORMS, Content, FreePieces, of_rows
from tests.support.cases import Case, pairwise
from tests.support.numerics import assert_close_to_float64
from tests.support.problems import Problem, magnitudes

BATCH, HEADS = 2, 4
# The unmasked keys, by name; in the second sequence, all of them.
MASKS = {"left": lambda j, n: j >= n // 3, "right": lambda j, n: j < max(1, n - n // 3)}


def key_mask(name: str | None, n_key: int) -> Tensor | None:
    if name is None:
        return None
    of_first = MASKS[name](torch.arange(n_key), n_key)
    return torch.stack([of_first, torch.ones(n_key, dtype=torch.bool)])[:, None, None]


def dense(bias, n_query: int, n_key: int, is_causal: bool, mask: Tensor | None) -> Tensor:
    """The bias of every pair; with is_causal, that of as many positions as possible, sliced."""
    places = (max(n_query, n_key),) * 2 if is_causal else (n_query, n_key)
    if isinstance(bias, FreePieces):  # positions are counted from the first token
        before = [0] if mask is None else mask[:, 0, 0].byte().argmax(-1).tolist()
        return torch.cat([bias.dense(*places, n)[..., :n_query, :n_key] for n in before])
    if getattr(bias, "gain", None) is not None:
        gain = functional.pad(bias.gain, (0, places[0] - n_query))
        bias = biases.CumulativeBias(bias.steps, gain, bias.kernel)
    if isinstance(bias, biases.RelativeBias) and bias.query_factors is not None:
        factors = functional.pad(bias.query_factors, (0, 0, 0, places[0] - n_query))
        bias = dataclasses.replace(bias, query_factors=factors)
    return bias.dense(*places)[..., :n_query, :n_key]


def added(bias, n_query: int, n_key: int, is_causal: bool, mask: Tensor | None) -> Tensor:
    """The bias of every pair, -inf where it is masked, in float64."""
    pairs = torch.zeros(n_query, n_key, dtype=torch.float64)
    if bias is not None:
        pairs = pairs + dense(bias, n_query, n_key, is_causal, mask)
    seen = torch.ones(n_query, n_key, dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if mask is not None:
        seen = seen & mask
    return torch.where(seen, pairs, -torch.inf)


def by_torch(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor) -> Tensor:
    """PyTorch's function, with the bias of every pair."""
    return functional.scaled_dot_product_attention(q, k, v, pairs.to(q.dtype), enable_gqa=True)


class Added(nn.Module):
    """The bias of every pair, which depends on a module's parameters."""

    def __init__(self, pairs: Tensor, of: nn.Module | None):
        super().__init__()
        self.pairs, self.of = pairs, of

    def dense(self, n_query: int, n_key: int) -> Tensor:
        return self.pairs


def sizes(q, k, v, pairs: Tensor, grad_o: Tensor, of: nn.Module | None = None) -> list[Tensor]:
    """The sums of absolute terms of the output and the gradients of q, k, v and parameters."""
    lengths, dims = (q.shape[2], k.shape[2]), (q.shape[3], v.shape[3])
    case = Case(lengths=lengths, dims=dims, heads=(q.shape[1], k.shape[1]), causal=False)
    tensors = (x.double() for x in (q, k, v))
    problem = Problem(case, *tensors, Added(pairs, of), grad_o.double(), torch.zeros(()))
    terms = magnitudes(problem, q.dtype)
    del terms["lse"]
    return list(terms.values())


def largest_mean(v: Tensor) -> Tensor:
    """At least the sums of the absolute terms of an output, whose weights sum to at most 1."""
    return v.abs().amax(-2, keepdim=True)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


COMBINATIONS = pairwise(
    bias=[*FORMS],
    lengths=[(1, 1), (40, 40), (17, 63), (63, 17), (1, 30), (30, 1)],
    is_causal=[False, True],
    mask=[None, *MASKS],
    kv_heads=[4, 2],
)


@pytest.mark.parametrize("row", COMBINATIONS, ids=lambda row: "-".join(map(str, row.values())))
def test_outputs_and_gradients_equal_pytorch(row):
    (n_query, n_key), kv_heads = row["lengths"], row["kv_heads"]
    is_causal, mask = row["is_causal"], key_mask(row["mask"], n_key)
    places = max(n_query, n_key) if is_causal else n_key
    made = FORMS[row["bias"]](Case(lengths=(n_query, places), heads=(HEADS, kv_heads), batch=BATCH))
    parameters = [] if made is None else list(made.double().parameters())
    bias = made() if isinstance(made, Content) else made
    inputs = leaf(2, 4, n_query, 8), leaf(2, kv_heads, n_key, 8), leaf(2, kv_heads, n_key, 5)
    given = bias
    if isinstance(bias, biases.RelativeBias):  # vectors of visible keys
        given = of_rows(bias, keys=slice(min(n_query, n_key) if is_causal else n_key))
    ours = scaled_dot_product_attention(
        *inputs, mask, is_causal=is_causal, enable_gqa=kv_heads != HEADS, bias=given
    )
    pairs = added(bias, n_query, n_key, is_causal, mask)
    exact = by_torch(*inputs, pairs)
    cotangent, leaves = torch.randn_like(exact), [*inputs, *parameters]
    of_output, *of_leaves = sizes(*inputs, pairs, cotangent, made)
    assert_close_to_float64(ours, exact, None, "output", of_output)
    gradients = [torch.autograd.grad(x, leaves, cotangent) for x in (ours, exact)]
    for *results, terms in zip(*gradients, of_leaves, strict=True):
        assert_close_to_float64(*results, None, "gradient", terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_dtypes(dtype, is_causal):
    inputs = [torch.randn(2, HEADS, n, 16).to(dtype) for n in (70, 50, 50)]
    bias, mask = biases.ALiBi(HEADS), key_mask("right", 50)
    ours = scaled_dot_product_attention(*inputs, mask, is_causal=is_causal, bias=bias)
    pairs = added(bias, 70, 50, is_causal, mask)
    exact, naive = by_torch(*(x.double() for x in inputs), pairs), by_torch(*inputs, pairs)
    assert ours.dtype == dtype
    assert_close_to_float64(ours, exact, naive, "output", sizes(*inputs, pairs, exact)[0])


@pytest.mark.parametrize("leading", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_leading_dimensions(leading, is_causal):
    q, k, v = (torch.randn(*leading, HEADS, n, 8, dtype=torch.float64) for n in (9, 20, 20))
    mask = torch.arange(20) < torch.randint(1, 21, (*leading, 1, 1, 1))
    ours = scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
    exact = by_torch(q, k, v, added(None, 9, 20, is_causal, mask))
    assert_close_to_float64(ours, exact, None, "output", largest_mean(v))


@pytest.mark.parametrize("shape", [(2, 4, 0, 8), (0, 4, 6, 8), (3, 2, 4, 0, 8)], ids=str)
@pytest.mark.parametrize("n_key", [0, 5])
@pytest.mark.parametrize("is_causal", [False, True])
def test_empty_inputs(is_causal, n_key, shape):
    q, k = torch.randn(shape), torch.randn(*shape[:-2], n_key, 8)
    mask = torch.ones(*shape[:-3], 1, 1, n_key, dtype=torch.bool)
    for attn_mask in (None, mask):
        ours = scaled_dot_product_attention(q, k, k, attn_mask, is_causal=is_causal)
        assert torch.equal(ours, functional.scaled_dot_product_attention(q, k, k))


def test_autocast_unifies_dtypes():
    """As in PyTorch: norms return float32, projections bfloat16."""
    q, k, v = torch.randn(3, 2, HEADS, 20, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = scaled_dot_product_attention(q, k, v.bfloat16(), is_causal=True)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    assert torch.equal(ours, scaled_dot_product_attention(q, k, v, is_causal=True))


def test_inputs_without_heads():
    q, k, v = torch.randn(3, 12, 8, dtype=torch.float64)
    ours = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    exact = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    assert_close_to_float64(ours, exact, None, "output", largest_mean(v))


@pytest.mark.parametrize("lengths", [(30, 20), (20, 30)], ids=str)
def test_masked_keys_are_never_read(lengths):
    q, k, v = (torch.randn(2, HEADS, n, 8) for n in (lengths[0], *2 * lengths[1:]))
    mask = key_mask("left", lengths[1])
    exact = scaled_dot_product_attention(q, k, v, mask, is_causal=True, bias=biases.ALiBi(HEADS))
    hidden = ~mask.transpose(-1, -2).expand_as(k)
    k, v = (x.masked_fill(hidden, torch.nan) for x in (k, v))
    ours = scaled_dot_product_attention(q, k, v, mask, is_causal=True, bias=biases.ALiBi(HEADS))
    assert torch.equal(ours, exact)


@pytest.mark.parametrize("lengths", [(17, 40), (40, 17), (20, 20)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gains_per_position_are_selected_for_the_queries(is_causal, lengths):
    n_query, n_key = lengths
    places = max(lengths) if is_causal else n_key
    q, k, v = leaf(1, HEADS, n_query, 8), leaf(1, HEADS, n_key, 8), leaf(1, HEADS, n_key, 8)
    steps, gain = leaf(1, HEADS, places), leaf(1, HEADS, places)
    if n_query > places:  # there is not one gain per query
        with pytest.raises(ValueError, match="gain has length 17; it must be"):
            attend_with(gain, steps, q, k, v, is_causal)
        return
    of_queries = gain[..., :n_query] if is_causal else gain[..., places - n_query :]
    ours, exact = (attend_with(x, steps, q, k, v, is_causal) for x in (gain, of_queries))
    assert torch.equal(ours, exact)


def attend_with(gain, steps, q, k, v, is_causal):
    bias = biases.CumulativeBias(steps, gain)
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, bias=bias)


def test_compiles_as_one_graph():
    bias, mask = biases.KerpleLog(HEADS), key_mask("right", 30)

    def attend(q, k, v):
        return scaled_dot_product_attention(q, k, v, mask, is_causal=True, bias=bias)

    inputs = leaf(2, HEADS, 40, 8), leaf(2, HEADS, 30, 8), leaf(2, HEADS, 30, 8)
    leaves = [*inputs, *bias.parameters()]
    results = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
        out = function(*inputs)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, eager in zip(*results, strict=True):
        assert torch.equal(ours, eager)


Q, K = torch.randn(2, 4, 6, 8), torch.randn(2, 4, 9, 8)
MASK = torch.ones(2, 1, 1, 9, dtype=torch.bool)
GAP = MASK.clone()
GAP[1, ..., 4] = False
WRONG = {
    "query is not a tensor": (TypeError, "query is a list", {"query": [1.0]}),
    "query is a vector": (ValueError, r"query has shape \(8,\)", {"query": Q[0, 0, 0]}),
    "key has another batch": (ValueError, "key has shape", {"key": K[:1]}),
    "value has another length": (ValueError, "value has shape", {"value": K[:, :, 1:]}),
    "value has another dtype": (TypeError, "value is torch.float64", {"value": K.double()}),
    "key has another head_dim": (ValueError, "key has head_dim 7", {"key": K[..., :7]}),
    "heads differ": (ValueError, "key has 2 heads and query 4", {"key": K[:, :2]}),
    "heads do not divide": (
        ValueError,
        "key has 3 heads; their number must divide that of query",
        {"key": K[:, :3], "enable_gqa": True},
    ),
    "dropout": (ValueError, "dropout_p is 0.1; it must be 0", {"dropout_p": 0.1}),
    "is_causal is not a bool": (TypeError, "is_causal is 1", {"is_causal": 1}),
    "scale is infinite": (ValueError, "scale is inf", {"scale": float("inf")}),
    "bias is a tensor": (TypeError, "bias is a Tensor", {"bias": torch.zeros(6, 9)}),
    "steps have another length": (
        ValueError,
        "bias: its steps have length 6; it must be 9",
        {"bias": biases.CumulativeBias(torch.zeros(1, 4, 6))},
    ),
    "mask is a list": (TypeError, "attn_mask is a list", {"attn_mask": [True]}),
    "mask of ints": (
        TypeError,
        "attn_mask is torch.int64; it .* or floating",
        {"attn_mask": MASK.long()},
    ),
    "mask is added and bias": (
        ValueError,
        "bias is given with an attn_mask of pairs; pass the sum",
        {"attn_mask": MASK.float(), "bias": biases.ALiBi(4)},
    ),
    "mask is added to other keys": (
        ValueError,
        "attn_mask has shape .* it must broadcast to",
        {"attn_mask": torch.zeros(6, 8)},
    ),
    "mask of other pairs": (
        ValueError,
        r"attn_mask has shape \(6, 8\); it must broadcast to \(2, 4, 6, 9\)",
        {"attn_mask": torch.ones(6, 8, dtype=torch.bool)},
    ),
    "mask of pairs and bias": (
        ValueError,
        "bias is given with an attn_mask of pairs",
        {"attn_mask": torch.ones(6, 9, dtype=torch.bool), "bias": biases.ALiBi(4)},
    ),
    "mask of another length": (ValueError, "attn_mask has shape", {"attn_mask": MASK[..., :5]}),
    "mask with a gap": (
        ValueError,
        "attn_mask has padding between",
        {"attn_mask": GAP},
    ),
    "mask on another device": (ValueError, "attn_mask is on meta", {"attn_mask": MASK.to("meta")}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_name_the_argument(wrong):
    error, message, arguments = WRONG[wrong]
    with pytest.raises(error, match=message):
        scaled_dot_product_attention(**({"query": Q, "key": K, "value": K} | arguments))
