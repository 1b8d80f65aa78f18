"""`theory`: convergence and receptive fields of biases, from their formulas."""

from __future__ import annotations

from pathlib import Path

import click
import torch
from rich.console import Console

from .. import biases
from ..biases.distance import PositionBias
from ..extrapolation import convergence, log_fit, mean_receptive_field
from .plot import needed
from .predict import named_formula


@click.command()
@click.argument("names", metavar="[BIAS]...", nargs=-1)
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1))
@click.option("--eps", default=0.01, show_default=True, type=click.FloatRange(0, 1, True, True))
@click.option(
    "--fit",
    "nearest",
    multiple=True,
    type=click.IntRange(2),
    help="Fit a log(1 + d) + c to this number of the nearest distances; may be repeated.",
)
@click.option("--length", default=512, show_default=True, type=click.IntRange(2))
@click.option(
    "--output",
    default="theory",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
)
def theory(
    names: tuple[str, ...],
    heads: int,
    eps: float,
    nearest: tuple[int, ...],
    length: int,
    output: Path,
):
    """Analyse formulas of biases: convergence of the series of exp(b), and receptive fields.

    BIAS is the name of a bias of the distance, perhaps with arguments, as 'alibi(shift=6)', or
    package.module:Class for one of your own; by default all of them. Trainable biases are analysed
    at initialization. The plots curves.png, heat_maps.png and receptive_fields.png are written to
    the folder OUTPUT.
    """
    pictures = needed("extrapolation.pictures")
    torch.manual_seed(0)
    console = Console()
    curves, pairs, fields = {}, {}, {}
    for name in names or biases.DISTANCE_BIASES:
        bias = bias_of(name, heads)
        verdict = convergence(bias)
        field = ", ".join(f"{x:.6g}" for x in bias.receptive_field(eps).tolist())
        console.print(f"[bold]{name}[/bold]", highlight=False)
        lines = [str(verdict), f"receptive field at {eps}: {field}"]
        lines += [f"fit to the nearest {points}: {fitted(bias, points)}" for points in nearest]
        console.print(*lines, "", sep="\n", highlight=False, soft_wrap=True)
        curves[name] = pictures.curves(bias, length)
        pairs[name] = pictures.weights(bias, length)
        weights = torch.from_numpy(curves[name]).exp()
        fields[name] = tuple(x.numpy() for x in mean_receptive_field(weights))
    output.mkdir(parents=True, exist_ok=True)
    pictures.all_biases(curves).savefig(output / "curves.png", dpi=120)
    pictures.heat_maps(pairs).savefig(output / "heat_maps.png", dpi=120)
    pictures.receptive_fields(fields).savefig(output / "receptive_fields.png", dpi=120)
    console.print(f"saved {output}/curves.png, heat_maps.png and receptive_fields.png")


def bias_of(name: str, heads: int) -> PositionBias:
    """The bias of the distance with this name."""
    bias = named_formula(name, heads).bias
    if bias is None:
        known = ", ".join(biases.DISTANCE_BIASES)
        raise click.BadParameter(f"{name} has no bias; it may be {known}")
    return bias


def fitted(bias: PositionBias, points: int) -> str:
    """The fit of each head, and the fraction of the variance that it explains."""
    d = torch.arange(points, dtype=torch.float64)
    curves = bias.curve(d).detach().expand(bias.num_heads, -1)
    fits = []
    for curve, slope, constant in zip(curves, *log_fit(bias, points), strict=True):
        unexplained = (curve - slope * d.log1p() - constant).var() / curve.var()
        fits.append(f"{slope:.3f} log(1 + d) {constant:+.3f} (R^2 {1 - unexplained:.3f})")
    return ", ".join(fits)
