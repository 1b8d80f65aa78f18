"""`reproduce`: tables of the papers, measured with small models."""

from __future__ import annotations

from pathlib import Path

import click

from ..extrapolation import experiment
from ..extrapolation.training.checkpoints import write_atomically
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

    Lengths are those of the paper divided by 8, and windows and slopes of ALiBi are changed
    accordingly. As the text differs, quotients of perplexities are compared. The tables are written
    to TABLE.md in the folder OUTPUT, which also contains all results and checkpoints: the same
    command resumes after an interruption.
    """
    presets = needed("extrapolation.experiment.presets")
    report = needed("extrapolation.experiment.report")
    preset = presets.PRESETS[table]
    try:
        experiments = preset.experiments(seeds, steps or presets.STEPS)
        text = experiment.read_text()
        for settings in experiments:
            experiment.check_text(settings, text)
        output.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    parts = []
    for settings in experiments:
        folder = output / f"{table}-{settings.train_length}"
        try:
            results = experiment.run(settings, text, folder)
        except experiment.CheckpointError as error:
            raise click.ClickException(str(error)) from error
        reference = report.Reference.of(settings, text)
        report.write_report(settings, results, reference, folder)
        parts.append(presets.beside(preset, settings, results, reference))
    path = output / f"{table}.md"
    write_atomically(path, ("\n\n".join(parts) + "\n").encode())
    click.echo(path.read_text())
    click.echo(f"saved {path}")
