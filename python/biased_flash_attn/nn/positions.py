"""How a model knows positions: a bias of attention, or one of the baselines of the papers."""

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
    """A position scheme. `positions(name)` makes those that have a name.

    Args:
        bias: makes, from num_heads and dim, a module that takes hidden states (B, N, dim) to a bias
            of `biased_flash_attn.biases`; None for attention without one.
        embedding: "sinusoidal" or "learned", what is added to the embeddings of tokens; None for
            nothing.
        rotary: whether queries and keys are turned by their positions (Su et al., 2021).
        window: if given, a query sees that many past keys, its own included.
    """

    bias: Callable[[int, int], nn.Module] | None = None
    embedding: str | None = None
    rotary: bool = False
    window: int | None = None


def positions(scheme: str | Positions) -> Positions:
    """The scheme of a name: a bias, "none", "sinusoidal", "learned", "rotary" or "window_WIDTH".

    "package.module:Class" is a bias of one's own: a `DistanceBias` made by num_heads, or a module
    made by dim and num_heads that is called on hidden states, as `Cable` is.

    Raises ValueError for other names, and TypeError for what is neither a name nor a scheme.
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
    """What makes the bias that is the class `path`, "package.module:Class"."""
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
