"""Modules that are created without memory get the initial values of an ordinary construction."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from biased_flash_attn import biases
from biased_flash_attn.nn import BASELINES, BiasedAttention, CausalLM, Encoder
from biased_flash_attn.nn.named_biases import make

HEADS, DIM, LAYERS, VOCABULARY = 4, 24, 2, 19
SIZES = {"max_length": 5}
SETTINGS = {
    "alibi": {"trainable": True},
    "sandwich": {"trainable": True},
    "cable-init": {"init": 0.3, "bias": True},
    "cable_nw-init": {"init": 0.3},
    "kernelized_cable-init": {"init": 0.3},
    "fire": {"init_c": 0.3, "init_length": 7},
    "transformer_xl-table": {"max_distance": 3},
    "banded_relative-norm": {"max_norm": 1.0},
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    **{
        name: lambda name=name: make(
            biases.NAMED[name.partition("-")[0]], HEADS, DIM, **SETTINGS.get(name, {})
        )
        for name in biases.NAMED | SETTINGS
    },
    "function": lambda: biases.DistanceBias.from_function(nn.Linear(1, HEADS), HEADS),
    "normalized": lambda: biases.NormalizedBias.from_function(nn.Linear(1, HEADS), HEADS),
    "BiasedAttention": lambda: BiasedAttention(DIM, HEADS, "cable(init=0.3)", kv_heads=2),
    **{
        f"{kind.__name__}-{scheme}": lambda kind=kind, scheme=scheme: kind(
            VOCABULARY, DIM, LAYERS, HEADS, scheme, **SIZES
        )
        for kind in (CausalLM, Encoder)
        for scheme in (*biases.NAMED, *BASELINES)
    },
}


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def reset(module: nn.Module, recurse: bool) -> None:
    """Initializes a module like FSDP, which allocates the memory of all parts at once, or that of
    each before its initialization."""
    if recurse:
        allocate(module, recurse)
    for part in module.modules():
        if not recurse:
            allocate(part, recurse)
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


@torch.no_grad()
def allocate(module: nn.Module, recurse: bool) -> None:
    module.to_empty(device="cpu", recurse=recurse)
    for x in (*module.parameters(recurse), *module.buffers(recurse)):
        x.fill_(math.nan)


@pytest.mark.parametrize("recurse", [True, False], ids=["at once", "one by one"])
@pytest.mark.parametrize("name", MODULES)
def test_modules_without_memory_are_initialized_later(name, recurse):
    torch.manual_seed(1)
    constructed = state_of(MODULES[name]())
    with torch.device("meta"):
        module = MODULES[name]()
    torch.manual_seed(1)
    reset(module, recurse)
    restored = state_of(module)
    assert restored.keys() == constructed.keys()
    for x, value in constructed.items():
        assert torch.equal(restored[x], value), x


@pytest.mark.parametrize("kind", [CausalLM, Encoder])
def test_models_are_initialized_like_gpt2(kind):
    model = kind(500, 64, 8, HEADS)
    block = model.blocks[0]
    assert model.head.weight is model.embedding.tokens.weight
    for layer, std in (
        (model.embedding.tokens, 0.02),
        (block.attention.project, 0.02),
        (block.attention.out, 0.005),
        (block.mlp[0], 0.02),
        (block.mlp[2], 0.005),
    ):
        assert abs(layer.weight.std() / std - 1) < 0.05
        assert getattr(layer, "bias", None) is None or not layer.bias.any()
