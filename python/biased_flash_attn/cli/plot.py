"""`plot`: the curves of a bias."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import click
import torch

from ..nn.named_biases import NAMED, QUERY_DEPENDENT, LayerBias
from .text import Layer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD_DIM = 64
SEED = 0


@click.command(epilog=f"BIAS is one of {', '.join(NAMED)}.")
@click.argument("bias", metavar="BIAS", type=click.Choice(list(NAMED)))
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1))
@click.option("--length", default=512, show_default=True, type=click.IntRange(2))
@click.option("--output", type=click.Path(dir_okay=False), help="[default: BIAS.png]")
def plot(bias: str, heads: int, length: int, output: str | None):
    """Draw BIAS and exp(BIAS) against the distance, one curve per head, and exp(BIAS) of all pairs.

    A bias that depends on the query is drawn for several queries of the first head. Trainable
    biases are drawn at initialization, those computed from content for random hidden states,
    queries and keys.
    """
    torch.manual_seed(SEED)
    output = output or f"{bias}.png"
    figure_of(bias, heads, length).savefig(output, dpi=150)
    click.echo(f"saved {output}; random parameters and contents are those of seed {SEED}")


def figure_of(name: str, heads: int, length: int) -> Figure:
    """The plot of a bias at initialization."""
    pictures = needed("extrapolation.pictures")
    module, layer = LayerBias(name, heads, heads * HEAD_DIM), random_layer(heads, length)
    several = bias_of(module, layer, min(length, pictures.MAPPED))
    if name in QUERY_DEPENDENT:
        return pictures.query_dependent_bias(name, pictures.rows(several, length))
    curves = pictures.curves(bias_of(module, layer, 1), length)
    return pictures.one_bias(name, curves, pictures.weights(several, length))


def random_layer(heads: int, length: int) -> Layer:
    """Random inputs of a layer, for biases computed from them."""
    return Layer(
        torch.randn(1, length, heads * HEAD_DIM), *torch.randn(3, 1, heads, length, HEAD_DIM)
    )


def bias_of(module: LayerBias, layer: Layer, n_query: int):
    """The bias of the last n_query queries of a layer and all keys."""
    return module(layer.x, layer.q[:, :, -n_query:], layer.k).bias


def needed(module: str) -> ModuleType:
    """Imports a plotting module, whose dependency is optional."""
    try:
        return importlib.import_module(f"..{module}", __package__)
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'biased-flash-attn[plot]'"
        raise click.ClickException(message) from error
