"""`predict`: how much a model may lose at longer sequences, from the formula of its bias."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import torch
from tqdm import tqdm

from ..extrapolation.comparison import largest_field
from ..extrapolation.formulas import Formula, formula_of
from ..extrapolation.prediction import HEADS, beyond, information
from ..extrapolation.tables import table
from .plot import needed


@click.command()
@click.argument("names", metavar="SCHEME...", nargs=-1, required=True)
@click.option("--layers", default=12, show_default=True, type=click.IntRange(1))
@click.option("--heads", default=12, show_default=True, type=click.IntRange(1))
@click.option("--train-length", default=512, show_default=True, type=click.IntRange(1))
@click.option("--eval-length", default=8192, show_default=True, type=click.IntRange(1))
@click.option(
    "--output",
    default="predictions",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
)
def predict(
    names: tuple[str, ...],
    layers: int,
    heads: int,
    train_length: int,
    eval_length: int,
    output: Path,
):
    """Predict from formulas which models lose at longer sequences than those of training.

    SCHEME is the name of a bias of the distance, perhaps with arguments, as 'alibi(shift=4)', or
    window(WIDTH) or none. Printed is the fraction of what reaches the last of the tokens through
    all layers that comes from farther away than the training length: as the mean of the heads, in
    the head with the smallest fraction, and with heads that are mixed in each layer. The command
    `published` compares it with measurements. Trainable biases have the initial values of seed 0,
    and alibi its original slopes; those of Chi et al. (2023) are "alibi(slopes='geometric')". The
    picture predictions.png is written to the folder OUTPUT.
    """
    if eval_length <= train_length:
        raise click.BadParameter(
            f"{eval_length} must be longer than that of training, {train_length}",
            param_hint="--eval-length",
        )
    pictures = needed("extrapolation.prediction_pictures")
    torch.manual_seed(0)
    formulas = {name: named_formula(name, heads) for name in names}
    lines, curves = [["scheme", *HEADS, "receptive field"]], {}
    for name, formula in tqdm(formulas.items(), leave=False, disable=None):
        bias, window = formula
        walk = partial(information, bias, layers, eval_length, window=window)
        curves[name], mixed = walk(), walk(mixed=True)
        shares = [
            beyond(mixed if combined == "mixed" else curves[name], train_length, combined)
            for combined in HEADS
        ]
        field = f"{largest_field(formula, layers):.0f}"
        lines.append([name, *(f"{share:.3f}" for share in shares), field])
    click.echo(table(lines))
    output.mkdir(parents=True, exist_ok=True)
    pictures.of_schemes(curves, train_length).savefig(output / "predictions.png", dpi=120)
    click.echo(f"saved {output}/predictions.png")


def named_formula(name: str, heads: int) -> Formula:
    try:
        return formula_of(name, heads)
    except (TypeError, ValueError) as error:
        raise click.BadParameter(str(error)) from error
