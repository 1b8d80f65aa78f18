"""Evaluates a trained model with every instrument of the laboratory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...nn import CausalLM
from ..attention_weights import attention_masses
from ..gradients import cumulative_gradient, empirical_receptive_field
from ..perplexity import (
    Perplexity,
    last_token_perplexity,
    nonoverlapping_perplexity,
    sliding_perplexity,
)
from ..receptive_field import mean_receptive_field
from .settings import Settings

PROTOCOLS = ("sliding", "last_token", "nonoverlapping")
EPS = 0.01  # the fraction outside of a receptive field: of gradient, weights and series
POINTS = 256  # of the gradient's curve


def evaluate(settings: Settings, model: CausalLM, text: Tensor) -> dict[str, object]:
    """All results of a model as plain values, at the lengths that its positions allow."""
    longest = math.inf if model.max_length is None else model.max_length
    lengths = [length for length in settings.eval_lengths if length <= longest]
    measured = {"parameters": sum(p.numel() for p in model.parameters())}
    with settings.autocast():
        measured["perplexity"] = {
            protocol: {
                str(length): _perplexity(settings, model, text, protocol, length)
                for length in lengths
            }
            for protocol in PROTOCOLS
        }
        if lengths:
            measured |= _receptive_fields(settings, model, text, lengths[-1])
    return measured | {"theory": _theory(model, settings.eval_lengths[-1])}


def segments(text: Tensor, count: int, length: int) -> Tensor:
    """`count` evenly spaced segments of a text, with length + 1 tokens, (count, length + 1)."""
    starts = torch.linspace(0, len(text) - length - 1, count).long()
    return text[starts[:, None] + torch.arange(length + 1)]


def _perplexity(
    settings: Settings, model: CausalLM, text: Tensor, protocol: str, length: int
) -> dict[str, float]:
    size = settings.size
    if protocol == "last_token":
        pieces = segments(text, size.segments, settings.eval_lengths[-1])
        found = last_token_perplexity(model, pieces, length)
    elif protocol == "sliding":
        stride = min(length, max(1, settings.train_length // 2))
        found = sliding_perplexity(model, text[: size.stream + 1], length, stride)
    else:
        found = nonoverlapping_perplexity(model, text[: size.stream + 1], length)
    return _plain(found)


def _plain(found: Perplexity) -> dict[str, float]:
    return {
        "perplexity": found.value,
        "nats": found.nats,
        "standard_error": found.standard_error,
        "tokens": found.tokens,
    }


def _receptive_fields(
    settings: Settings, model: CausalLM, text: Tensor, length: int
) -> dict[str, object]:
    """Receptive fields by gradients and by attention weights, of sequences of this length."""
    inputs = segments(text, settings.size.gradients, length)[:, :-1].long()
    curves = cumulative_gradient(model, inputs)
    fields = attention_masses(model, inputs[:2], EPS)
    step = max(1, length // POINTS)
    tokens = torch.arange(step - 1, length, step)
    return {
        "gradient": {
            "length": length,
            "tokens": (tokens + 1).tolist(),
            "share": curves.mean(0)[tokens].tolist(),
            "receptive_field": empirical_receptive_field(curves).double().mean().item(),
        },
        # Means over the second half of the queries, which see at least half of the keys.
        "attention_mass": {
            name: field[..., length // 2 :].double().mean((0, 2)).tolist()
            for name, field in fields.items()
        },
    }


@torch.no_grad()
def _theory(model: CausalLM, length: int) -> dict[str, object]:
    """Receptive fields of the trained biases' series, infinite ones as None, and their mean curve.

    Empty for models without biases that are functions of the distance.
    """
    found = {name: m for name, m in model.named_modules() if getattr(m, "of_distance", False)}
    if not found:
        return {}
    fields = {name: bias.receptive_field(EPS).tolist() for name, bias in found.items()}
    d = torch.arange(length, dtype=torch.float64, device=next(model.parameters()).device)
    weights = torch.cat([bias.curve(d).exp() for bias in found.values()])
    field, eps = mean_receptive_field(weights)
    return {
        "fields": {
            name: [field if math.isfinite(field) else None for field in heads]
            for name, heads in fields.items()
        },
        "length": length,
        "eps": eps.tolist(),
        "tokens": (field * length).tolist(),
    }
