"""`plot`: the curves of a bias."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import click
import torch

from ..biases import NAMED, Bias
from ..nn import positions
from .text import Layer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD_DIM = 64
SEED = 0


@click.command(epilog=f"BIAS is one of {', '.join(NAMED)}.")
@click.argument("bias", metavar="BIAS")
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1))
@click.option("--length", default=512, show_default=True, type=click.IntRange(2))
@click.option(
    "--output", type=click.Path(dir_okay=False, path_type=Path), help="[default: BIAS.png]"
)
def plot(bias: str, heads: int, length: int, output: Path | None):
    """Draw BIAS and exp(BIAS) against the distance, one curve per head, and exp(BIAS) of all pairs.

    BIAS may have arguments, as in 'alibi(shift=6)', or be one of your own, package.module:Class. A
    bias that depends on the query is drawn for several queries of the first head. Trainable biases
    are drawn at initialization, those computed from content for random hidden states, queries and
    keys.
    """
    torch.manual_seed(SEED)
    figure = figure_of(bias, heads, length)
    output = output or Path(f"{bias.rpartition(':')[2]}.png")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    click.echo(f"saved {output}; random parameters and contents are those of seed {SEED}")


def figure_of(name: str, heads: int, length: int) -> Figure:
    """The plot of a bias at initialization."""
    pictures = needed("extrapolation.pictures")
    try:
        make = positions(name).bias
    except (TypeError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="BIAS") from error
    if make is None:
        raise click.BadParameter(f"{name} has no bias to draw", param_hint="BIAS")
    layer = random_layer(heads, length)
    inputs = layer.x, layer.q, layer.k
    with torch.no_grad():
        return pictures.of_bias(name, make(heads, heads * HEAD_DIM), inputs, length)


def random_layer(heads: int, length: int) -> Layer:
    """Random inputs of a layer, for biases computed from them."""
    return Layer(
        torch.randn(1, length, heads * HEAD_DIM), *torch.randn(3, 1, heads, length, HEAD_DIM)
    )


def bias_of(module: Bias, layer: Layer, n_query: int):
    """The bias of the last n_query queries of a layer and all keys."""
    return module(layer.x, layer.q[:, :, -n_query:], layer.k)


def needed(module: str) -> ModuleType:
    """Imports a module whose dependency is optional."""
    try:
        return importlib.import_module(f"..{module}", __package__)
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'biased-flash-attn[plot]'"
        raise click.ClickException(message) from error
