"""Models that tests compare, and their results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from biased_flash_attn import biases
from biased_flash_attn.nn import BASELINES, CausalLM, Encoder, Positions
from tests.support.numerics import assert_close_to_float64

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


def check_each_alone(
    model: nn.Module, logits: Tensor, tokens: Tensor, ranges: list[tuple[int, slice]]
) -> None:
    """Logits (B, N, V) in each (row, columns), and their gradients with respect to every parameter,
    are those of these tokens alone."""
    weights, total, alone = torch.randn_like(logits), 0.0, []
    for b, columns in ranges:
        exact, terms = with_terms(model.head, model, tokens[b : b + 1, columns])
        own = logits[b, columns]
        assert_close_to_float64(own, exact[0], None, f"row {b}, {columns}", terms[0])
        total = total + (own * weights[b, columns]).sum()
        alone.append(gradients(model, (exact[0] * weights[b, columns]).sum()))
    # Some gradients are sums that cancel, as a constant added to all logits has no effect: their
    # terms are as large as gradients of other parameters.
    terms = sum(max(x.abs().max() for x in found.values()) for found in alone)
    for name, actual in gradients(model, total).items():
        exact = sum(found[name] for found in alone)
        assert_close_to_float64(actual, exact, None, f"gradient of {name}", terms)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


EVERY_MODEL = [
    *((causal_lm, scheme) for scheme in SCHEMES),
    *((encoder, scheme) for scheme in (*TWO_SIDED, SCALED, NORMALIZED)),
]
