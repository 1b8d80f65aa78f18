"""`plot`: the curves of a bias."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import click
import torch
from torch import Tensor

from ..nn.named_biases import BIASES, make_bias

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD_DIM = 64


@click.command(epilog=f"BIAS is one of {', '.join(BIASES)}.")
@click.argument("bias", metavar="BIAS", type=click.Choice(BIASES))
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1))
@click.option("--length", default=512, show_default=True, type=click.IntRange(2))
@click.option("--output", type=click.Path(dir_okay=False), help="[default: BIAS.png]")
def plot(bias: str, heads: int, length: int, output: str | None):
    """Draw BIAS and exp(BIAS) against the distance, one curve per head, and exp(BIAS) of all pairs.

    Trainable biases are drawn at initialization, those computed from content for random hidden
    states.
    """
    torch.manual_seed(0)
    output = output or f"{bias}.png"
    figure_of(bias, heads, length).savefig(output, dpi=150)
    click.echo(f"saved {output}")


def figure_of(name: str, heads: int, length: int) -> Figure:
    """The plot of a bias at initialization."""
    pictures = needed("extrapolation.pictures")
    x = hidden_states(heads, length)
    bias = make_bias(name, heads, x.shape[-1])(x)
    return pictures.one_bias(name, pictures.curves(bias, length), pictures.weights(bias, length))


def hidden_states(heads: int, length: int) -> Tensor:
    """Random hidden states (1, length, heads * HEAD_DIM) for biases computed from content."""
    return torch.randn(1, length, heads * HEAD_DIM)


def needed(module: str) -> ModuleType:
    """Imports a plotting module, whose dependency is optional."""
    try:
        return importlib.import_module(f"..{module}", __package__)
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'biased-flash-attn[plot]'"
        raise click.ClickException(message) from error
