"""`plot`: the curves of a bias."""

import importlib
from types import ModuleType

import click
import torch

from ..nn.named_biases import BIASES, make_bias

HEAD_DIM = 64


@click.command(epilog=f"BIAS is one of {', '.join(BIASES)}.")
@click.argument("bias", metavar="BIAS", type=click.Choice(BIASES))
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1))
@click.option("--length", default=512, show_default=True, type=click.IntRange(2))
@click.option("--output", type=click.Path(dir_okay=False), help="[default: BIAS.png]")
def plot(bias: str, heads: int, length: int, output: str | None):
    """Draw BIAS and exp(BIAS) over the distance, one curve a head, and exp(BIAS) of all pairs.

    Trainable biases are drawn as training starts them, those that read hidden states over random
    ones.
    """
    pictures = needed("extrapolation.pictures")
    torch.manual_seed(0)
    module = make_bias(bias, heads, heads * HEAD_DIM)
    x = torch.randn(1, length, heads * HEAD_DIM)
    output = output or f"{bias}.png"
    made = module(x)
    figure = pictures.one_bias(bias, pictures.curves(made, length), pictures.weights(made, length))
    figure.savefig(output, dpi=150)
    click.echo(f"saved {output}")


def needed(module: str) -> ModuleType:
    """A module of this package that draws, whose dependency is optional."""
    try:
        return importlib.import_module(f"..{module}", __package__)
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing: pip install 'biased-flash-attn[plot]'"
        raise click.ClickException(message) from error
