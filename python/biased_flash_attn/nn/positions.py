"""Position schemes of models: an attention bias, or one of the baselines of the papers."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ..biases.base import PositionBias
from .named_biases import BIASES, OfPositions, make_bias

BASELINES = ("none", "sinusoidal", "learned", "rotary")
WINDOW = re.compile(r"window_([1-9]\d*)")


@dataclass(frozen=True)
class Positions:
    """A position scheme. `positions(name)` returns a scheme by its name.

    Args:
        bias: a function of num_heads and dim that creates a module, which maps hidden states
            (B, N, dim) to a bias of `biased_flash_attn.biases`; None for attention without bias.
        embedding: "sinusoidal" or "learned" embeddings, which are added to those of tokens; None
            for no embeddings.
        rotary: whether queries and keys are rotated by their positions (Su et al., 2021).
        window: if given, the number of past keys that a query sees, including its own position.
    """

    bias: Callable[[int, int], nn.Module] | None = None
    embedding: str | None = None
    rotary: bool = False
    window: int | None = None


def positions(scheme: str | Positions) -> Positions:
    """The scheme `name`: a bias, "none", "sinusoidal", "learned", "rotary" or "window_WIDTH".

    "package.module:Class" is a bias of your own: a `DistanceBias` constructed with num_heads, or a
    module constructed with dim and num_heads and called on hidden states, like `Cable`.

    Raises ValueError for other names, and TypeError for other types.
    """
    if isinstance(scheme, Positions):
        return scheme
    if not isinstance(scheme, str):
        raise TypeError(f"positions is {scheme!r}; it must be a name or a Positions")
    if scheme in BIASES:
        return Positions(bias=lambda num_heads, dim: make_bias(scheme, num_heads, dim))
    if scheme in ("sinusoidal", "learned"):
        return Positions(embedding=scheme)
    if width := WINDOW.fullmatch(scheme):
        return Positions(window=int(width[1]))
    if scheme in BASELINES:
        return Positions(rotary=scheme == "rotary")
    if ":" in scheme:
        return Positions(bias=_imported(scheme))
    known = ", ".join((*BASELINES, "window_WIDTH", "module:Class", *BIASES))
    raise ValueError(f"positions is {scheme!r}; it may be {known}")


def _imported(path: str) -> Callable[[int, int], nn.Module]:
    """A function that creates a bias of the class `path`, "package.module:Class"."""
    module, _, name = path.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"positions is {path!r}; it must be a class: {error}") from error
    if not isinstance(made, type) or not issubclass(made, nn.Module):
        raise ValueError(f"positions is {path!r}; it must be a class of biases, an nn.Module")
    if issubclass(made, PositionBias):
        return lambda num_heads, dim: OfPositions(made(num_heads))
    return lambda num_heads, dim: made(dim, num_heads)
