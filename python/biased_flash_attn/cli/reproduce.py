"""`reproduce`: tables and figures of the papers, measured with small models."""

from __future__ import annotations

from pathlib import Path

import click

from ..extrapolation import experiment
from ..extrapolation.training.checkpoints import write_atomically
from .extrapolate import Seeds
from .plot import needed

NAMES = (
    "chi-table-1",
    "chi-table-2",
    "chi-table-5",
    "qin-figure-6",
    "cable-table-2",
    "cable-table-3",
)


@click.command()
@click.argument("name", type=click.Choice(NAMES))
@click.option(
    "--seeds", default="0", show_default=True, type=Seeds(), help="A model for each of them."
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    help="Training steps.  [default: 1000; 2500 for cable-table-2]",
)
@click.option(
    "--output",
    default="reproduction",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder for results and checkpoints.",
)
def reproduce(name, seeds, steps, output):
    """Train the models of a paper's table or figure at a size for two CPU cores.

    \b
    chi-table-1    altered slopes of ALiBi, and windows
    chi-table-2    two of these, trained at longer sequences
    chi-table-5    Sandwich and ALiBi, evaluated with a sliding cache
    qin-figure-6   receptive fields of formulas and of trained models
    cable-table-2  encoders with CABLE and four others: masked tokens here,
                   retrieval in the paper
    cable-table-3  CABLE and eight others, GPT-tiny

    In tables, lengths are those of the paper divided by 8, and windows, slopes of ALiBi, clipped
    tables and FIRE are changed accordingly. As the text differs, perplexities are compared by their
    quotients. What is compared is printed and written to NAME.md in the folder OUTPUT, which also
    contains all results, pictures and checkpoints: the same command resumes after an interruption.
    """
    presets = needed("extrapolation.reproduction")
    report = needed("extrapolation.experiment.report")
    pictures = needed("extrapolation.experiment.picture")
    preset = presets.PRESETS[name]
    try:
        experiments = preset.experiments(seeds, steps)
        text = experiment.read_text()
        for settings in experiments:
            experiment.check_text(settings, text)
        output.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    parts = []
    for settings in experiments:
        folder = output / f"{name}-{settings.train_length}"
        try:
            results = experiment.run(settings, text, folder)
        except experiment.CheckpointError as error:
            raise click.ClickException(str(error)) from error
        reference = report.Reference.of(settings, text)
        report.write_report(settings, results, reference, folder)
        pictures.write(settings, results, reference, folder)
        parts.append(preset.beside(settings, results, reference))
    path = output / f"{name}.md"
    write_atomically(path, ("\n\n".join(parts) + "\n").encode())
    click.echo(path.read_text())
    click.echo(f"saved {path}")
