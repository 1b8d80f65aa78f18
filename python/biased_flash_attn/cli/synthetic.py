"""`synthetic`: trains small models on tasks whose optimum is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from ..extrapolation.training import CheckpointError
from ..extrapolation.training.settings import check_device
from ..nn.positions import split_names
from .extrapolate import Lengths, Seeds
from .plot import needed

SCHEMES = "alibi,none,rotary,window(16),kerple_log,sandwich,type2,inverse_distance,t5,cable"
TASKS = ("markov", "recall", "parity")


@click.command()
@click.argument("task", type=click.Choice(TASKS))
@click.option(
    "--biases",
    "schemes",
    default=SCHEMES,
    show_default=True,
    help="Comma-separated schemes, as for extrapolate. The others are compared with the first one.",
)
@click.option(
    "--seeds", default="0..4", show_default=True, type=Seeds(), help="A model for each of them."
)
@click.option(
    "--lengths",
    default="64..4096",
    show_default=True,
    type=Lengths(),
    help="Training is at the first one, evaluation at all of them.",
)
@click.option("--steps", type=click.IntRange(1), help="Training steps.  [default: 2000]")
@click.option("--device", default="cpu", show_default=True)
@click.option(
    "--output",
    default="synthetic",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder for results and checkpoints.",
)
def synthetic(task, schemes, seeds, lengths, steps, device, output):
    """Train on a task whose optimum is known: what do models gain from a longer context?

    \b
    markov  Every document has a random Markov chain of its own, which more
            context reveals better. Measured is which share of the gain of
            the best prediction a model reaches.
    recall  A symbol is marked at the beginning and asked for at the end.
    parity  Is the number of ones so far odd?

    A model is trained for each scheme and seed, in one to two minutes on two CPU cores. The results
    are written to TASK.md, TASK.json, TASK.png and TASK.html, an interactive plot, in the folder
    OUTPUT, which also contains checkpoints: the same command resumes after an interruption.
    """
    experiment = needed("extrapolation.synthetic")
    pictures = needed("extrapolation.synthetic.picture")
    size = experiment.Size()
    if steps is not None:
        size = dataclasses.replace(size, steps=steps)
    names = tuple(split_names(schemes))
    try:
        settings = experiment.Settings(task, names, seeds, lengths, size, device)
        check_device(device)
        output.mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    try:
        results = experiment.run(settings, output)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error
    paths = experiment.write_report(settings, results, output)
    paths += pictures.write(settings, results, output)
    click.echo(paths[0].read_text())
    for path in paths:
        click.echo(f"saved {path}")
