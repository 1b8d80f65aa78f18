"""`predict`: how much a model may lose at longer sequences, from the formula of its bias."""

from __future__ import annotations

import math
from pathlib import Path

import click
import torch

from ..extrapolation import predict as predicted
from ..extrapolation.comparison import (
    CHOICE,
    CHOSEN,
    HELD_OUT,
    PREDICTORS,
    Comparison,
    agreement,
    by_model,
    comparisons,
    largest_field,
)
from ..extrapolation.experiment.report import table
from ..extrapolation.formulas import Formula, formula_of
from ..extrapolation.prediction import HEADS, information
from .plot import needed


@click.command()
@click.argument("names", metavar="[SCHEME]...", nargs=-1)
@click.option("--layers", default=12, show_default=True, type=click.IntRange(1))
@click.option("--heads", default=12, show_default=True, type=click.IntRange(1))
@click.option("--train-length", default=512, show_default=True, type=click.IntRange(1))
@click.option("--eval-length", default=8192, show_default=True, type=click.IntRange(1))
@click.option(
    "--published", is_flag=True, help="Compare predictions with the tables of papers instead."
)
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
    published: bool,
    output: Path,
):
    """Predict from formulas which models lose at longer sequences than those of training.

    SCHEME is the name of a bias of the distance, perhaps with arguments, as 'alibi(shift=4)', or
    window(WIDTH) or none. Printed is the fraction of what reaches the last of the tokens through
    all layers that comes from farther away than the training length: in the head with the smallest
    fraction, as the mean of the heads, and with heads that are mixed in each layer. Trainable
    biases have the initial values of seed 0. The picture predictions.png is written to the folder
    OUTPUT.

    With --published, the tables of the papers determine all settings. published.md and
    published.png are written.
    """
    if published == bool(names):
        raise click.UsageError("give names of schemes, or --published")
    pictures = needed("extrapolation.prediction_pictures")
    output.mkdir(parents=True, exist_ok=True)
    if published:
        found = comparisons()
        text = f"{comparison_table(found)}\n\n{agreement_table(found)}\n"
        (output / "published.md").write_text(text)
        pictures.against_published(found).savefig(output / "published.png", dpi=120)
        click.echo(text)
        click.echo(f"saved {output}/published.md and published.png")
        return
    torch.manual_seed(0)
    formulas = {name: named_formula(name, heads) for name in names}
    click.echo(prediction_table(formulas, layers, train_length, eval_length))
    curves = {
        name: information(bias, layers, eval_length, window=window)
        for name, (bias, window) in formulas.items()
    }
    pictures.of_schemes(curves, train_length).savefig(output / "predictions.png", dpi=120)
    click.echo(f"saved {output}/predictions.png")


def named_formula(name: str, heads: int) -> Formula:
    try:
        return formula_of(name, heads)
    except (TypeError, ValueError) as error:
        raise click.BadParameter(str(error)) from error


def prediction_table(
    formulas: dict[str, Formula], layers: int, train_length: int, eval_length: int
) -> str:
    lines = [["scheme", *HEADS, "receptive field"]]
    for name, formula in formulas.items():
        bias, window = formula
        shares = [
            predicted(bias, layers, train_length, eval_length, window=window, heads=heads)
            for heads in HEADS
        ]
        field = largest_field(formula, layers)
        lines.append([name, *(f"{share:.2g}" for share in shares), f"{field:.0f}"])
    return table(lines)


def comparison_table(found: list[Comparison]) -> str:
    """One line per model that was trained on one or more texts, those with one prediction."""
    lines = [["scheme", "paper", "tables", "layers", "lengths", "part", "predicted", "measured"]]
    lines += [comparison_line(same) for same in by_model(found)]
    return table(lines)


def comparison_line(same: list[Comparison]) -> list[str]:
    row, (first, last) = same[0].row, same[0].lengths
    return [
        row.scheme,
        row.paper.split()[0],
        ", ".join(dict.fromkeys(x.row.table for x in same)),
        str(row.layers),
        f"{row.train_length}: {first} to {last}",
        same[0].part,
        f"{same[0].predicted[CHOSEN]:.2g}",
        ", ".join(f"{x.row.dataset} {math.exp(x.loss):.2f}" for x in same),
    ]


def agreement_table(found: list[Comparison]) -> str:
    parts = {
        CHOICE: [x for x in found if x.part == CHOICE],
        HELD_OUT: [x for x in found if x.part == HELD_OUT],
        "both": [x for x in found if x.part in (CHOICE, HELD_OUT)],
        "Qin": [x for x in found if x.row.paper.startswith("Qin")],
    }
    lines = [["predictor", "part", "schemes", "rank", "95 %", "linear", "95 %", "doubled"]]
    for name in PREDICTORS:
        for part, chosen in parts.items():
            got = agreement(chosen, name)
            correlations = (got.rank, got.rank_interval), (got.linear, got.linear_interval)
            numbers = [cell for found in correlations for cell in with_interval(*found)]
            lines.append([name, part, str(got.schemes), *numbers, f"{got.doubled:.2f}"])
    return table(lines)


def with_interval(value: float, interval: tuple[float, float]) -> list[str]:
    """A dash for both if there is no correlation, as with infinite predictions."""
    if math.isnan(value):
        return ["-", "-"]
    low, high = interval
    return [f"{value:.2f}", f"{low:.2f} to {high:.2f}"]
