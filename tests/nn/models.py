"""Models that tests compare, and their results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from biased_flash_attn import biases
from biased_flash_attn.nn import BASELINES, CausalLM, Encoder, Positions

DIM, HEADS, KV_HEADS, VOCABULARY = 24, 4, 2, 19
SCALED = "banded_relative(log_floor=3)"  # by positions, with the logits
NORMALIZED = "fire(init_length=3)"  # by positions
SCHEMES = (*biases.NAMED, *BASELINES, "window(5)", SCALED, NORMALIZED)
TWO_SIDED = (*biases.NAMED, *BASELINES)


def causal_lm(scheme: str | Positions) -> CausalLM:
    model = CausalLM(VOCABULARY, DIM, 2, HEADS, scheme, kv_heads=KV_HEADS, max_length=64).double()
    return larger(model)


def encoder(scheme: str) -> Encoder:
    return larger(Encoder(VOCABULARY, DIM, 2, HEADS, scheme, max_length=64).double())


def larger(model: nn.Module) -> nn.Module:
    """With larger weights than the initial ones, whose attention is almost uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def with_terms(last: nn.Linear, model: Callable, *inputs) -> tuple[Tensor, Tensor]:
    """A model's outputs, and the sums of the absolute terms of its last layer."""
    terms = []

    def add(module, args, output):
        offset = 0 if last.bias is None else last.bias.abs()
        terms.append(functional.linear(args[0].abs(), last.weight.abs()) + offset)

    with last.register_forward_hook(add):
        outputs = model(*inputs)
    return outputs, *terms
