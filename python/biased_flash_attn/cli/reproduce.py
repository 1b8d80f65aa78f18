"""`reproduce`: tables of the papers, measured with small models."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from ..extrapolation import experiment
from .extrapolate import Seeds
from .plot import needed

TABLES = ("chi-table-1", "chi-table-2", "chi-table-5", "cable-table-3")


@click.command()
@click.argument("table", type=click.Choice(TABLES))
@click.option(
    "--seeds", default="0", show_default=True, type=Seeds(), help="A model for each of them."
)
@click.option("--steps", type=click.IntRange(1), help="Training steps.  [default: 1000]")
@click.option(
    "--output",
    default="reproduction",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder for results and checkpoints.",
)
def reproduce(table, seeds, steps, output):
    """Train the models of a paper's table at a size for two CPU cores, and print both results.

    \b
    chi-table-1    altered slopes of ALiBi, and windows
    chi-table-2    two of these, trained at longer sequences
    chi-table-5    Sandwich and ALiBi, evaluated with a sliding cache
    cable-table-3  CABLE and eight others, GPT-tiny

    Lengths are those of the paper divided by 8. Windows and slopes of ALiBi are changed
    accordingly, so that they are the same fractions of the training length. Perplexity is compared
    as its quotient by that at the training length. The tables are written to TABLE.md in the folder
    OUTPUT, which also contains checkpoints: the same command resumes after an interruption.
    """
    presets = needed("extrapolation.experiment.presets")
    preset, size = presets.PRESETS[table], presets.SIZE
    if steps is not None:
        size = dataclasses.replace(size, steps=steps)
    text = experiment.read_text()
    parts = []
    try:
        output.mkdir(parents=True, exist_ok=True)
        for settings in preset.experiments(seeds, size):
            results = experiment.run(settings, text, output / f"{table}-{settings.train_length}")
            reference = experiment.Reference.of(settings, text)
            parts.append(presets.beside(preset, settings, results, reference))
    except (OSError, experiment.CheckpointError) as error:
        raise click.ClickException(str(error)) from error
    path = output / f"{table}.md"
    path.write_text("\n\n".join(parts) + "\n")
    click.echo(path.read_text())
    click.echo(f"saved {path}")
