"""Invalid arguments of biases raise an error that names the argument and its value."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.forms import Geometry

ONES = torch.ones(2, 3, 4)


def lower(bias, geometry: Geometry | None = None):
    return bias.lower(geometry or Geometry(4, 4), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("make", biases.DISTANCE_BIASES.values())
@pytest.mark.parametrize(
    ("num_heads", "error"),
    [(0, ValueError), (-2, ValueError), (2.0, TypeError), (True, TypeError), ("8", TypeError)],
)
def test_num_heads_is_a_positive_int(make, num_heads, error):
    with pytest.raises(error, match=f"num_heads must be .*{num_heads}"):
        make(num_heads)


@pytest.mark.parametrize("make", biases.CONTEXT_BIASES.values())
def test_context_biases_check_their_sizes(make):
    with pytest.raises(ValueError, match="num_heads must be positive, not 0"):
        make(8, 0)
    with pytest.raises(ValueError, match="dim must be positive, not -1"):
        make(-1, 2)
    with pytest.raises(TypeError, match=r"dim must be an int, not 8\.0"):
        make(8.0, 2)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: biases.ALiBi(2, shift="3"), TypeError, "shift must be a number, not '3'"),
        (lambda: biases.ALiBi(2, shift=float("nan")), ValueError, "shift must be finite, not nan"),
        (lambda: biases.ALiBi(2, exponent=True), TypeError, "exponent must be a number, not True"),
        (
            lambda: biases.ALiBi(2, slopes="press"),
            ValueError,
            "slopes is 'press'; it may be 'alibi' or 'geometric', or one number per head",
        ),
        (
            lambda: biases.ALiBi(2, slopes=[1.0]),
            ValueError,
            "slopes has 1 numbers; it must have one per head, 2",
        ),
        (lambda: biases.Type1(2, slopes=3), TypeError, "slopes is a int; it must be a name or one"),
        (
            lambda: biases.Type1(1, slopes=[float("inf")]),
            ValueError,
            r"slopes\[0\] must be finite, not inf",
        ),
        (
            lambda: biases.Type2(2, slopes=[1, -1]),
            ValueError,
            "slopes has -1.0; it must have no negative number",
        ),
        (
            lambda: biases.ALiBi(1, slopes=[1], shift=1),
            ValueError,
            "shift and exponent need named slopes; slopes has numbers",
        ),
        (lambda: biases.Sandwich(2, dbar=7), ValueError, "dbar must be even, not 7"),
        (lambda: biases.Sandwich(2, dbar=0), ValueError, "dbar must be positive, not 0"),
        (
            lambda: biases.Sandwich(2, first_frequency=2),
            ValueError,
            "first_frequency must be 0 or 1, not 2",
        ),
        (
            lambda: biases.T5(2, num_buckets=31),
            ValueError,
            "num_buckets must be even and at least 2, not 31",
        ),
        (
            lambda: biases.T5(2, num_buckets=2, bidirectional=True),
            ValueError,
            "num_buckets must be even and at least 4, not 2",
        ),
        (
            lambda: biases.T5(2, max_distance=16),
            ValueError,
            "max_distance must exceed 16, not 16",
        ),
        (
            lambda: biases.ClippedTable(2, -1),
            ValueError,
            "max_distance must be positive, not -1",
        ),
        (
            lambda: biases.Cable(8, 2, init=-1),
            ValueError,
            "init is -1; it must be None or a stand",
        ),
        (
            lambda: biases.Cable(8, 2, activation="gelu"),
            ValueError,
            r"activation must be one of \['relu', 'softplus'\], not 'gelu'",
        ),
        (
            lambda: biases.Cable(8, 2, activation=["relu"]),
            ValueError,
            r"activation must be one of \['relu', 'softplus'\], not \['relu'\]",
        ),
        (
            lambda: biases.ALiBi(4, exponent=-2000),
            ValueError,
            "shift or exponent is so small that a slope is infinite",
        ),
        (
            lambda: biases.ALiBi(3, shift=-1026),
            ValueError,
            "shift or exponent is so small that a slope is infinite",
        ),
        (
            lambda: biases.KerpleLog(2).dense(-1, 3),
            ValueError,
            "n_query is -1; it must be a nonnegative int",
        ),
        (
            lambda: biases.DistanceBias.from_function(3, 2),
            TypeError,
            "function must be callable, not int",
        ),
    ],
)
def test_constructors_validate_their_settings(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda d: d[:-1], r"returned \(3,\)"),
        (lambda d: d.expand(3, -1), r"returned \(3, 4\)"),
        (lambda d: d.sum(), r"returned \(\)"),
        (lambda d: -0.5, "returned float"),
        (lambda d: 1j * d, r"returned \(4,\) torch.complex128"),
    ],
)
def test_formulas_must_return_one_logit_per_distance(function, got):
    bias = biases.DistanceBias.from_function(function, 2)
    with pytest.raises(ValueError, match=rf"{got}.* for 4 distances; .* \(4,\) or \(2, 4\)"):
        lower(bias)


def test_errors_of_formulas_name_the_formula_and_its_distances():
    class Misspelled(biases.DistanceBias):
        def formula(self, d):
            return self.slope * d

    message = (
        r"the formula of Misspelled failed for distances of shape \(4,\), torch\.float64 on cpu: "
        "AttributeError: .*slope"
    )
    with pytest.raises(RuntimeError, match=message) as raised:
        lower(Misspelled(2))
    assert isinstance(raised.value.__cause__, AttributeError)


def test_distance_biases_need_a_formula():
    with pytest.raises(NotImplementedError, match=r"DistanceBias must define formula\(d\)"):
        lower(biases.DistanceBias(2))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"steps": [1.0]}, TypeError, "steps must be a floating point tensor, not list"),
        ({"steps": ONES.int()}, TypeError, "steps must be a floating .*, not a torch.int32 tensor"),
        ({"steps": ONES[0]}, ValueError, r"steps has shape \(3, 4\); it must be \(B or 1, H, N\)"),
        ({"steps": ONES, "gain": 2.0}, TypeError, "gain must be a floating .*, not float"),
        ({"steps": ONES, "gain": ONES[0]}, ValueError, r"gain has shape \(3, 4\)"),
        ({"steps": ONES, "gain": ONES[:, :2]}, ValueError, r"gain has shape \(2, 2, 4\).*heads"),
        ({"steps": ONES, "gain": torch.ones(3, 3, 4)}, ValueError, r"gain has shape \(3, 3, 4\)"),
        ({"steps": ONES, "kernel": "log"}, ValueError, "kernel must be one of .*, not 'log'"),
    ],
)
def test_cumulative_bias_checks_its_tensors(arguments, error, message):
    with pytest.raises(error, match=message):
        biases.CumulativeBias(**arguments)


def test_steps_have_the_length_of_the_keys():
    with pytest.raises(ValueError, match="steps has length 4; it must be the number of keys, 5"):
        lower(biases.CumulativeBias(ONES), Geometry(4, 5))


@pytest.mark.parametrize(("n_gain", "n_query"), [(3, 2), (5, 4), (4, 5)])
def test_gains_have_the_length_of_queries_or_keys(n_gain, n_query):
    bias = biases.CumulativeBias(ONES, torch.ones(1, 3, n_gain))
    message = f"gain has length {n_gain}; it must be the number of queries, {n_query}, or of keys"
    with pytest.raises(ValueError, match=message):
        lower(bias, Geometry(n_query, 4))


@pytest.mark.parametrize("make", biases.CONTEXT_BIASES.values())
def test_hidden_states_of_the_wrong_shape_raise(make):
    bias = make(8, 2)
    with pytest.raises(ValueError, match=r"x has shape \(5, 8\); it must be \(B, N, 8\)"):
        bias(torch.ones(5, 8))
    with pytest.raises(ValueError, match=r"x has shape \(1, 5, 7\); it must be \(B, N, 8\)"):
        bias(torch.ones(1, 5, 7))
    with pytest.raises(TypeError, match=r"x must be a floating .*, not a torch\.int64 tensor"):
        bias(torch.ones(1, 5, 8, dtype=torch.int64))


WIDTH = nn.Parameter(torch.ones(2, 1))


def test_captured_parameters_warn():
    width, network, table = nn.Parameter(torch.ones(2, 1)), nn.Linear(1, 2), torch.ones(2, 9)
    for name, function in {
        "width, a Parameter": lambda d: -d * width,
        "WIDTH, a Parameter": lambda d: -d * WIDTH,
        "network, a Linear": lambda d: network(d[:, None]).mT,
    }.items():
        with pytest.warns(UserWarning, match=f"^function reads {name} that is not among") as warned:
            biases.DistanceBias.from_function(function, 2)
        assert warned[0].filename == __file__
    network.requires_grad_(False)
    width.requires_grad_(False)
    biases.DistanceBias.from_function(lambda d: -d * width, 2)
    biases.DistanceBias.from_function(lambda d: -d * table.WIDTH, 2)  # not the global variable
    biases.DistanceBias.from_function(lambda d: network(d[:, None]).mT + table, 2)
    biases.DistanceBias.from_function(torch.nn.Softplus(), 2)
    biases.DistanceBias.from_function(torch.sin, 2)


def test_a_function_may_read_the_parameters_of_a_module_that_makes_it():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(torch.ones(2, 1))

        def bias(self):
            return biases.DistanceBias.from_function(lambda d: -self.rate * d, 2)

    layer = Layer()
    layer.bias().dense(3, 3).sum().backward()
    assert (layer.rate.grad < 0).all()


def test_a_function_may_read_variables_that_are_assigned_later():
    bias = biases.DistanceBias.from_function(lambda d: -d * rate, 2)
    rate = torch.ones(2, 1)
    assert (bias.dense(1, 3)[:, 0, 0] == -2).all()


def test_compiled_code_makes_a_bias_of_a_function():
    def attention(q):
        bias = biases.DistanceBias.from_function(lambda d: -d * torch.ones(2, 1), 2)
        return biased_flash_attn(q, q, q, bias)

    q = torch.randn(1, 2, 5, 8)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q), attention(q))
