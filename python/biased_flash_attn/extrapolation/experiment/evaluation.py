"""Evaluates a trained model with every instrument of the laboratory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...nn import CausalLM, FusedAttention
from ..attention_weights import attention_masses
from ..gradients import cumulative_gradient, empirical_receptive_field
from ..receptive_field import mean_receptive_field
from ..training import Measured
from .blocks import Blocks, mean_by_file
from .settings import Settings

EPS = 0.01  # the fraction outside of a receptive field: of gradient, weights and series
POINTS = 256  # of the gradient's curve
POINTS_OF_SERIES = 101  # EPS is one of them
ATTENDING = 2**12  # tokens whose attention weights are measured, of two sequences at least


def evaluate(settings: Settings, blocks: Blocks, model: nn.Module) -> Measured:
    """All results of a model as plain values, at the lengths that its positions allow.

    Receptive fields of gradients and attention weights are those of causal models only.
    """
    longest = model.embedding.max_length or math.inf
    lengths = [length for length in settings.eval_lengths if length <= longest]
    measured: Measured = {"parameters": sum(p.numel() for p in model.parameters())}
    with settings.autocast(), sliding_cache(model, settings.cache):
        measured["nats"] = {}
        for length in lengths:
            losses = settings.prediction.losses(
                model, blocks.segments, length, settings.scored, settings.size.vocabulary
            )
            measured["nats"][str(length)] = mean_by_file(losses, blocks.files)
        if lengths and settings.prediction.causal:
            measured |= _receptive_fields(settings, model, blocks, lengths[-1])
    return measured | {"theory": _theory(model, settings.eval_lengths[-1])}


@contextmanager
def sliding_cache(model: nn.Module, keys: int | None) -> Iterator[None]:
    """Within the block, layers attend to the last `keys` keys at most, if it is not None.

    This is what a cache of so many keys leaves: each of them was computed with those before it.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, FusedAttention)]
    windows = [layer.window for layer in layers]
    try:
        for layer in layers:
            if keys is not None:
                layer.window = min(keys, layer.window or keys)
        yield
    finally:
        for layer, window in zip(layers, windows, strict=True):
            layer.window = window


def _receptive_fields(
    settings: Settings, model: CausalLM, blocks: Blocks, length: int
) -> dict[str, object]:
    """Receptive fields by gradients and by attention weights, of sequences of this length."""
    count = min(settings.size.gradients, len(blocks.segments))
    chosen = torch.linspace(0, len(blocks.segments) - 1, count).round().long()
    inputs = blocks.segments[chosen, -1 - length : -1].long()
    curves = cumulative_gradient(model, inputs)
    fields = {"embedding": empirical_receptive_field(curves).tolist()}
    for n, block in enumerate(model.blocks[:-1]):
        later = cumulative_gradient(model, inputs, embedding=block)
        fields[f"blocks.{n}"] = empirical_receptive_field(later).tolist()
    masses = attention_masses(model, inputs[: max(2, ATTENDING // length)], EPS)
    step = max(1, length // POINTS)
    tokens = torch.arange(step - 1, length, step)
    return {
        "gradient": {
            "length": length,
            "tokens": (tokens + 1).tolist(),
            "share": curves.mean(0)[tokens].tolist(),
            "receptive_fields": fields,
        },
        # Means over the second half of the queries, which see at least half of the keys.
        "attention_mass": {
            name: field[..., length // 2 :].double().mean((0, 2)).tolist()
            for name, field in masses.items()
        },
    }


@torch.no_grad()
def _theory(model: nn.Module, length: int) -> dict[str, object]:
    """Receptive fields of the trained biases' series, infinite ones as None, and their mean curve.

    Empty for models without biases that are functions of the distance.
    """
    found = {name: m for name, m in model.named_modules() if getattr(m, "of_distance", False)}
    if not found:
        return {}
    fields = {name: bias.receptive_field(EPS).tolist() for name, bias in found.items()}
    d = torch.arange(length, dtype=torch.float64, device=next(model.parameters()).device)
    weights = torch.cat([bias.curve(d).exp() for bias in found.values()])
    field, eps = mean_receptive_field(weights, POINTS_OF_SERIES)
    return {
        "fields": {
            name: [field if math.isfinite(field) else None for field in heads]
            for name, heads in fields.items()
        },
        "length": length,
        "eps": eps.tolist(),
        "tokens": (field * length).tolist(),
    }
