"""Custom `RelativeBias`es, and the validation of their arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.forms import Geometry, Relative
from tests.forms.relative_cases import REFERENCE


def factors(rank=3, heads=2):
    return torch.randn(1, heads, 5, rank)


def table(rank=3, n=4, heads=1):
    return torch.randn(heads, rank, n)


WRONG = {
    "nothing": (ValueError, "query_factors and key_factors are None", {}),
    "one of two": (
        ValueError,
        "query_factors is given and query_tables is None",
        {"query_factors": factors()},
    ),
    "the other of two": (
        ValueError,
        "key_tables is given and key_factors is None",
        {"key_tables": table()},
    ),
    "no tensor": (
        TypeError,
        "query_factors must be a floating point tensor, not int",
        {"query_factors": 3, "query_tables": table()},
    ),
    "integers": (
        TypeError,
        "query_tables must be a floating point tensor, not a torch.int64",
        {"query_factors": factors(), "query_tables": table().long()},
    ),
    "three dimensions": (
        ValueError,
        r"key_factors has shape \(2, 5, 3\); it must be \(B or 1",
        {"key_factors": factors()[0], "key_tables": table()},
    ),
    "rank 0": (
        ValueError,
        "query_factors has rank 0; it must be from 1 to 128",
        {"query_factors": factors(0), "query_tables": table(0)},
    ),
    "rank 129": (
        ValueError,
        "query_factors has rank 129; it must be from 1 to 128",
        {"query_factors": factors(129), "query_tables": table(129)},
    ),
    "other rank": (
        ValueError,
        r"query_tables has shape \(1, 4, 4\); it must be \(H or 1, 3, n\), n > 0",
        {"query_factors": factors(), "query_tables": table(4)},
    ),
    "no distance": (
        ValueError,
        r"query_tables has shape \(1, 3, 0\)",
        {"query_factors": factors(), "query_tables": table(n=0)},
    ),
    "other distances": (
        ValueError,
        "query_tables has 4 distances and key_tables has 5",
        {
            "query_factors": factors(),
            "query_tables": table(),
            "key_factors": factors(),
            "key_tables": table(n=5),
        },
    ),
    "a function and a tensor": (
        TypeError,
        "one of query_tables and key_tables is a function",
        {
            "query_factors": factors(),
            "query_tables": table(),
            "key_factors": factors(),
            "key_tables": torch.sin,
        },
    ),
    "other heads": (
        ValueError,
        r"the factors and tables have \[2, 3\] heads",
        {"query_factors": factors(), "query_tables": table(heads=3)},
    ),
    "first": (
        TypeError,
        "first is 0.5; it must be an int",
        {"query_factors": factors(), "query_tables": table(), "first": 0.5},
    ),
    "end is no int": (
        TypeError,
        "end is 4.0; it must be None or an int",
        {"query_factors": factors(), "query_tables": torch.sin, "end": 4.0},
    ),
    "end of a tensor": (
        ValueError,
        "end is 4, but the tables are tensors; it must be None",
        {"query_factors": factors(), "query_tables": table(), "end": 4},
    ),
    "end before first": (
        ValueError,
        "end is 2; it must be more than first, 2",
        {"query_factors": factors(), "query_tables": torch.sin, "first": 2, "end": 2},
    ),
    "beyond": (
        ValueError,
        "beyond is 'first'; it must be one of",
        {"query_factors": factors(), "query_tables": table(), "beyond": "first"},
    ),
}


@pytest.mark.parametrize(("error", "message", "arguments"), WRONG.values(), ids=WRONG)
def test_invalid_arguments_raise(error, message, arguments):
    with pytest.raises(error, match=message):
        biases.RelativeBias(**arguments)


def test_invalid_lengths_and_functions_raise():
    q = torch.randn(1, 2, 6, 8)
    with pytest.raises(
        ValueError, match=r"lowered to shape \(1, 2, 5, 3\); .* \(B or 1, H or 1, 6"
    ):
        REFERENCE(q, q, q, biases.RelativeBias(factors(), table()))
    with pytest.raises(ValueError, match=r"returned \(6,\) for 6 .* \(2, 3, 6\) or \(1, 3, 6\)"):
        REFERENCE(q, q, q, biases.RelativeBias(torch.randn(1, 2, 6, 3), torch.sin))
    with pytest.raises(ValueError, match=r"query_tables has shape \(2, 1, 3, 4\)"):
        Relative(factors(), torch.randn(2, 1, 3, 4), factors(0), torch.randn(1, 1, 0, 4))
    with pytest.raises(ValueError, match="rank is 129; it must be at most 128"):
        Relative(factors(129), table(129)[None], factors(0), torch.randn(1, 1, 0, 4))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("beyond", ["zero", "last"])
@pytest.mark.parametrize(("first", "end"), [(-3, 4), (0, 9), (2, 30), (-20, -2), (-40, 40)])
def test_functions_up_to_an_end_are_tables(first, end, beyond, causal):
    given, q = table(n=end - first).double(), torch.randn(1, 2, 12, 4).double()

    def function(d):
        assert first <= d.min()
        assert d.max() < end
        return given[..., (d - first).long()]

    u = torch.randn(1, 2, 12, 3).double()
    results = [
        REFERENCE(
            q, q, q, biases.RelativeBias(u, x, first=first, beyond=beyond, **end_of), causal=causal
        )
        for x, end_of in ((given, {}), (function, {"end": end}))
    ]
    assert torch.equal(*results)


def test_tensors_of_a_bias_may_be_trained():
    """Autograd continues into the modules that compute the tensors."""
    proj = nn.Linear(6, 2 * 3)
    x, q = torch.randn(1, 7, 6), torch.randn(1, 2, 7, 4)
    profiles = nn.Parameter(torch.randn(1, 3, 4))
    u = proj(x).unflatten(-1, (2, 3)).transpose(1, 2)
    REFERENCE(q, q, q, biases.RelativeBias(u, profiles)).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in (*proj.parameters(), profiles))


MODULES = {
    "banded": lambda: biases.BandedRelative(8, 2, extent=5, log_floor=3, max_norm=1.0),
    "shaw": lambda: biases.Shaw(2, 4, 3, 1),
    "transformer_xl": lambda: biases.TransformerXL(2, 4),
    "disentangled": lambda: biases.Disentangled(8, 2, max_distance=9, buckets=8),
    "gated_table": lambda: biases.GatedTable(8, 2, 8, 5),
}


# Dynamo instantiates torch.autograd.Function, of which PyTorch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", MODULES)
def test_modules_compile_without_graph_breaks(name):
    module, geometry = MODULES[name](), Geometry(9, 9, False)
    inputs = torch.randn(2, 9, 8), *torch.randn(2, 2, 2, 9, 4)

    def tensors(*inputs):
        return module(*inputs).lower(geometry, torch.float32, None).tensors

    torch.compiler.reset()
    compiled = torch.compile(tensors, backend="eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(*inputs), tensors(*inputs))


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_tensors_may_have_any_strides(backend, seed):
    q, k, v = torch.randn(3, 1, 2, 70, 8).double()
    u, w = torch.randn(2, 1, 2, 5, 70).double().mT
    every_other = torch.randn(1, 2, 70, 10).double()[..., ::2]
    same = torch.randn(1, 1, 70, 1).double().expand(1, 2, 70, 5)
    table = torch.randn(1, 33, 5).double().mT
    for factors in (w, every_other, same):
        given = u, table, factors, table
        strided, contiguous = (
            biased_flash_attn(q, k, v, biases.RelativeBias(*x), backend=backend)
            for x in (given, [x.contiguous() for x in given])
        )
        torch.testing.assert_close(strided, contiguous)


@pytest.mark.parametrize("lengths", [(0, 0), (0, 9), (9, 0)], ids=str)
def test_strides_of_no_rows_do_not_matter(lengths, backend):
    """`contiguous()` returns a tensor without elements as it is."""

    def tokens(n: int) -> torch.Tensor:
        x = torch.randn(1, 2, 8, 9).mT[:, :, :n]
        return (x.contiguous() if n else x).requires_grad_()

    (q, u), (k, w), table = (
        map(tokens, 2 * lengths[:1]),
        map(tokens, 2 * lengths[1:]),
        torch.ones(1, 8, 5),
    )
    bias = biases.RelativeBias(u, table, w, table)
    o = biased_flash_attn(q, k, k, bias, causal=False, backend=backend)
    assert o.shape == (1, 2, lengths[0], 8)
    assert not o.any()
    for x in torch.autograd.grad(o.sum(), (q, u, k, w)):
        assert not x.any()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_gradients_of_tables_in_half_precision_are_rounded_once(half, backend):
    """Tables end at different distances before and after the query, so that columns are added, all
    of which are the first one."""
    q, k, v = torch.randn(3, 1, 2, 70, 8)
    u, grad_o = torch.randn(1, 2, 70, 3), torch.randn(1, 2, 70, 8)
    table, grads = torch.randn(1, 3, 60).to(half), []
    for dtype, tables in ((torch.float32, table), (torch.float64, table.double())):
        tables.requires_grad_()
        given = [x.to(dtype) for x in (q, k, v)]
        bias = biases.RelativeBias(u.to(dtype), tables, first=-2, beyond="last")
        o = biased_flash_attn(
            *given, bias, causal=False, backend=backend if dtype == torch.float32 else "reference"
        )
        grads += torch.autograd.grad(o, tables, grad_o.to(dtype))
    found, exact = grads
    rounding = torch.finfo(half).eps * exact.abs() + 1e-6
    assert ((found.double() - exact).abs() <= rounding).all()


@pytest.mark.parametrize("terms", [("query",), ("key",), ("query", "key")])
def test_a_bias_of_one_head_is_that_of_all_heads(terms, backend):
    q, k = torch.randn(2, 2, 4, 20, 8)
    leaves, results = {}, []
    for side in terms:
        leaves[f"{side}_factors"] = torch.randn(2, 1, 20, 3, requires_grad=True)
        leaves[f"{side}_tables"] = torch.randn(1, 3, 9, requires_grad=True)
    for heads in (1, 4):
        given = {
            name: x.expand(-1, heads, -1, -1) if x.dim() == 4 else x.expand(heads, -1, -1)
            for name, x in leaves.items()
        }
        o = biased_flash_attn(q, k, k, biases.RelativeBias(**given), backend=backend)
        results.append((o, *torch.autograd.grad(o.square().sum(), leaves.values())))
    for shared, expanded in zip(*results, strict=True):
        torch.testing.assert_close(shared, expanded, rtol=1e-3, atol=1e-3)


def test_forms_need_contiguous_rows():
    factors, table = torch.randn(1, 1, 3, 8).mT, torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match="last dimension of query_factors must be contiguous"):
        Relative(factors, table, torch.randn(1, 1, 8, 0), torch.randn(1, 1, 0, 4))
