"""`published`: predictions from formulas against the tables of the papers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import click
from tqdm import tqdm

from ..extrapolation import convergence
from ..extrapolation.agreement import Agreement
from ..extrapolation.comparison import (
    CHOICE,
    HELD_OUT,
    SHOWN,
    VARIANTS,
    Comparison,
    by_model,
    comparisons,
    predicted,
)
from ..extrapolation.formulas import formula_of
from ..extrapolation.tables import table
from .plot import needed


@click.command()
@click.option(
    "--choice", is_flag=True, help="Score every variant on the rows for the choice, and stop."
)
@click.option(
    "--output",
    default="published",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
)
def published(choice: bool, output: Path):
    """Compare predictions from formulas with the perplexities that the papers publish.

    The rows are those whose scheme has no trained parameters. The table published.md and the
    picture published.png are written to the folder OUTPUT. With --choice, every variant of the
    prediction is scored on half of the schemes, in choice.md: the best one is what `predict`
    computes.
    """
    found = comparisons()
    if choice:
        output.mkdir(parents=True, exist_ok=True)
        write(choice_table(part_of(found, CHOICE)), output / "choice.md")
        return
    pictures = needed("extrapolation.prediction_pictures")
    output.mkdir(parents=True, exist_ok=True)
    tables = comparison_table(found), agreement_table(found), difference_table(found)
    write("\n\n".join(tables), output / "published.md")
    pictures.against_published(found).savefig(output / "published.png", dpi=120)
    click.echo(f"saved {output}/published.png")


def write(text: str, path: Path) -> None:
    path.write_text(f"{text}\n")
    click.echo(f"{text}\n\nsaved {path}")


def part_of(found: list[Comparison], part: str) -> list[Comparison]:
    return [x for x in found if x.part == part]


def choice_table(found: list[Comparison]) -> str:
    """The scores of all variants, best first."""
    scored = [
        (Agreement(found, variant), variant)
        for variant in tqdm(VARIANTS, leave=False, disable=None)
    ]
    scored.sort(key=lambda x: -x[0].score())
    lines = [["heads", "content", "residual", "within", "overall", "score"]]
    for got, variant in scored:
        numbers = (f"{x:.3f}" for x in (got.within(), got.overall(), got.score()))
        lines.append([variant.heads, f"{variant.content:g}", f"{variant.residual:g}", *numbers])
    return table(lines)


def comparison_table(found: list[Comparison]) -> str:
    """One line per model that was trained on one or more texts, those with one prediction."""
    head = ["scheme", "paper", "tables", "layers", "lengths", "series", "part"]
    lines = [comparison_line(same) for same in tqdm(by_model(found), leave=False, disable=None)]
    return table([[*head, "predicted", "measured"], *lines])


def comparison_line(same: list[Comparison]) -> list[str]:
    row, (first, last) = same[0].row, same[0].lengths
    return [
        row.scheme,
        row.paper.split()[0],
        ", ".join(dict.fromkeys(x.row.table for x in same)),
        str(row.layers),
        f"{row.train_length}: {first} to {last}",
        "converges" if series_converges(row.scheme, row.heads) else "diverges",
        same[0].part,
        f"{predicted(same[0]):.3f}",
        ", ".join(f"{x.row.dataset} {math.exp(x.loss):.2f}" for x in same),
    ]


def series_converges(scheme: str, heads: int) -> bool:
    """Whether the series of exp(b) converges in every head; in a window it is a finite sum."""
    bias, window = formula_of(scheme, heads)
    return window is not None or (bias is not None and bool(convergence(bias).converges.all()))


def parts_of(found: list[Comparison]) -> dict[str, list[Comparison]]:
    return {part: part_of(found, part) for part in (CHOICE, HELD_OUT)} | {"both": found}


def agreement_table(found: list[Comparison]) -> str:
    """Correlations of each predictor, `within` of fewer schemes than `overall`."""
    head = ["predictor", "part", "schemes", "within", "95 %", "schemes", "rows", "overall", "95 %"]
    lines = []
    for name, predictor in tqdm(SHOWN.items(), leave=False, disable=None):
        for part, rows in parts_of(found).items():
            got = Agreement(rows, predictor)
            within = str(len(got.altered)), *with_interval(got, got.within)
            overall = str(len(got.schemes)), str(len(rows)), *with_interval(got, got.overall)
            lines.append([name, part, *within, *overall, f"{got.doubled():.2f}"])
    return table([[*head, "doubled"], *lines])


def difference_table(found: list[Comparison]) -> str:
    """By how much the chosen predictor's correlations are larger, in the same draws of schemes."""
    lines = [["chosen, minus", "part", "within", "95 %", "overall", "95 %"]]
    (_, chosen), *others = SHOWN.items()
    for name, other in tqdm(others, leave=False, disable=None):
        for part, rows in parts_of(found).items():
            first, second = Agreement(rows, chosen), Agreement(rows, other)
            cells = []
            for statistic in (Agreement.within, Agreement.overall):
                cells += with_interval(first, partial(difference, statistic, first, second))
            lines.append([name, part, *cells])
    return table(lines)


def difference(
    statistic: Callable[..., float],
    first: Agreement,
    second: Agreement,
    places: Sequence[int] | None = None,
) -> float:
    return statistic(first, places) - statistic(second, places)


def with_interval(got: Agreement, statistic: Callable[..., float]) -> list[str]:
    low, high = got.interval(statistic)
    return [f"{statistic():.2f}", f"{low:.2f} to {high:.2f}"]
