"""What all biases have in common: how they are applied, drawn and printed."""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn import biases
from biased_flash_attn.forms import Geometry
from biased_flash_attn.nn.named_biases import make

HEADS, HEAD_DIM, N = 2, 8, 12


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    q, k = torch.randn(2, 1, HEADS, N, HEAD_DIM)
    return {"x": torch.randn(1, N, HEADS * HEAD_DIM), "q": q, "k": k}


def named_bias(name: str) -> biases.Bias:
    return make(biases.NAMED[name], HEADS, HEADS * HEAD_DIM)


@pytest.mark.parametrize("name", biases.NAMED)
def test_biases_require_only_their_inputs(name, inputs):
    bias = named_bias(name)
    read = [name for name in inputs if name in bias.inputs]
    whole = bias(**inputs).dense(N, N)
    assert torch.equal(bias(**{name: inputs[name] for name in read}).dense(N, N), whole)
    for name in read:
        missing = {other: x for other, x in inputs.items() if other != name}
        with pytest.raises(TypeError, match=rf"^{name} is None; this bias is computed from it"):
            bias(**missing)


@pytest.mark.parametrize("name", ["banded_relative(log_floor=3)", *biases.QUERY_BIASES])
def test_the_last_queries_have_the_last_rows(name, inputs):
    kind, _, options = name.partition("(")
    options = {"log_floor": 3} if options else {}
    bias = make(biases.NAMED[kind], HEADS, HEADS * HEAD_DIM, **options)
    x, q, k = inputs.values()
    last, whole = bias(x, q[:, :, -5:], k).dense(5, N), bias(x, q, k).dense(N, N)
    torch.testing.assert_close(last, whole[:, :, -5:])


@pytest.mark.parametrize("name", biases.NAMED)
def test_every_bias_draws_itself(name, inputs):
    bias = named_bias(name)
    read = {name: x for name, x in inputs.items() if name in bias.inputs}
    figure = bias.plot(**read, length=N)
    assert figure.get_suptitle().startswith(type(bias).__name__)
    ends = {max(line.get_xdata()) for line in figure.axes[0].lines}
    # Queries 2, 5 and 8, by d + 1, or the last one, by d.
    assert ends == ({3, 6, 9} if name in biases.QUERY_BIASES else {N - 1})


def test_applied_and_lowered_biases_are_printed_by_their_shapes(inputs):
    x, q, _ = inputs.values()
    cable = named_bias("cable")(x)
    assert repr(cable) == (
        "CumulativeBias(steps=float32 (1, 2, 12), gain=float32 (1, 2, 12), kernel=None)"
    )
    lowered = cable.lower(Geometry(N, N), torch.float32, None)
    assert repr(lowered).startswith("Cumulative(sums=float64 (1, 2, 12), gain=float32 (1, 2, 12)")
    assert "query_tables=Shaw.table, key_factors=None" in repr(named_bias("shaw")(q=q))
    assert repr(biases.DenseBias(x)) == "DenseBias(tensor=float32 (1, 12, 16))"
