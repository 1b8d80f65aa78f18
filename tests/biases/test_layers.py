"""Biases call their layers, so that adapters, hooks and quantized layers apply to them."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.nn.utils import parametrizations

from biased_flash_attn import biases
from biased_flash_attn.biases import Bias
from tests.support.layers import Adapted

HEADS, HEAD_DIM, N = 2, 4, 9
DIM = HEADS * HEAD_DIM
CALLED = {
    "cable": partial(biases.Cable, DIM, HEADS),
    "kernelized_cable": partial(biases.KernelizedCable, DIM, HEADS, bias=True),
    "forget_gate": partial(biases.ForgetGate, DIM, HEADS),
    "banded_relative": partial(biases.BandedRelative, DIM, HEADS, 5, 3),
    "shaw": partial(biases.Shaw, HEADS, HEAD_DIM, 3),
    "transformer_xl": partial(biases.TransformerXL, HEADS, HEAD_DIM),
    "disentangled": partial(biases.Disentangled, DIM, HEADS, max_distance=4),
    "gated_table": partial(biases.GatedTable, DIM, HEADS, 8, 9),
}
called = pytest.mark.parametrize("name", CALLED)


def merged(adapted: Adapted) -> nn.Module:
    layer, change = copy.deepcopy(adapted.layer), adapted.b @ adapted.a
    with torch.no_grad():
        layer.weight += change.mT if isinstance(layer, nn.Embedding) else change
    return layer


def layers_of(bias: Bias) -> dict[str, nn.Module]:
    kinds = nn.Linear, nn.Embedding
    return {name: x for name, x in bias.named_children() if isinstance(x, kinds)}


def inputs(bias: Bias) -> dict[str, Tensor]:
    q, k = torch.randn(2, 1, HEADS, N, HEAD_DIM)
    given = {"x": torch.randn(1, N, DIM), "q": q, "k": k}
    return {name: x for name, x in given.items() if name in bias.inputs}


@called
def test_adapters_of_layers_change_the_bias_and_are_trained(name):
    bias = CALLED[name]()
    adapters = {name: Adapted(layer) for name, layer in layers_of(bias).items()}
    for name, adapter in adapters.items():
        setattr(bias, name, adapter)
    whole = copy.deepcopy(bias)
    for name, adapter in adapters.items():
        setattr(whole, name, merged(adapter))
    given = inputs(bias)
    dense = bias(**given).dense(N, N)
    exact = whole.double()(**{name: x.double() for name, x in given.items()}).dense(N, N)
    torch.testing.assert_close(dense, exact, rtol=1e-4, atol=1e-4)
    (dense * torch.randn_like(dense)).sum().backward()
    for adapter in adapters.values():
        assert adapter.a.grad.abs().max() > 0
        assert adapter.b.grad.abs().max() > 0


@called
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_hooks_of_layers_run(name, dtype):
    bias, ran = CALLED[name]().to(dtype), set()
    for layer_name, layer in layers_of(bias).items():
        layer.register_forward_hook(lambda *_, layer_name=layer_name: ran.add(layer_name))
    bias(**{name: x.to(dtype) for name, x in inputs(bias).items()}).dense(N, N)
    assert ran == set(layers_of(bias)) != set()


@pytest.mark.filterwarnings("ignore")  # PyTorch's, of a quantization that it will replace
@pytest.mark.parametrize("name", [name for name in CALLED if name != "shaw"])
def test_quantized_layers_approximate_the_bias(name):
    bias = CALLED[name]()
    linears = {x: layer for x, layer in layers_of(bias).items() if isinstance(layer, nn.Linear)}
    for x, layer in linears.items():
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        nn.init.normal_(plain.weight)
        setattr(bias, x, plain)
    quantized, given = quantize_dynamic(bias, {nn.Linear}), inputs(bias)
    assert not any(isinstance(getattr(quantized, x), nn.Linear) for x in linears)
    exact = bias(**given).dense(N, N)
    change = (quantized(**given).dense(N, N) - exact).abs().max()
    assert 0 < change < 0.1 * exact.abs().max()


def replaced(bias: biases.FIRE, n: int, layer: nn.Module) -> biases.FIRE:
    bias.mlp[n] = layer
    return bias


def hooked() -> nn.Linear:
    layer = nn.Linear(1, 32)
    layer.register_forward_pre_hook(lambda layer, x: None)
    return layer


@pytest.mark.parametrize(
    ("n", "make_layer", "error"),
    [
        (0, lambda: Adapted(nn.Linear(1, 32)), "mlp[0] of FIRE is a Adapted; it must be a torch."),
        (2, lambda: Adapted(nn.Linear(32, 2)), "mlp[2] of FIRE is a Adapted; it must be a torch."),
        (0, hooked, "mlp[0] of FIRE is a Linear with forward hooks; it must be a torch.nn.Linear"),
        (1, nn.GELU, "(1): GELU"),
    ],
)
def test_fire_refuses_layers_whose_weights_it_cannot_read(n, make_layer, error):
    bias = replaced(biases.FIRE(HEADS), n, make_layer())
    with pytest.raises(TypeError, match=re.escape(error)):
        bias.dense(N, N)


def test_fire_reads_parametrized_weights():
    bias = biases.FIRE(HEADS)
    parametrizations.weight_norm(bias.mlp[0])
    x = torch.linspace(0, 1, 5)[:, None].double()
    knots, slopes, intercepts = bias.double().pieces(1.0)
    segment = torch.searchsorted(knots, x[:, 0], right=True)
    pieces = intercepts[:, segment] + slopes[:, segment] * x[:, 0]
    torch.testing.assert_close(pieces.mT, bias.mlp(x))
