"""`extrapolate`: trains small models and evaluates them at longer contexts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
import torch

from ..extrapolation import experiment
from ..extrapolation.training.settings import check_device
from ..nn.positions import split_names
from .plot import needed

SCHEMES = "alibi,rotary,kerple_log,sandwich,t5,cable"


class Lengths(click.ParamType):
    """Lengths such as 128..2048, each twice the previous one, or 128,192,256."""

    name = "lengths"

    def convert(self, value, parameter, context) -> tuple[int, ...]:
        first, doubling, last = value.partition("..")
        try:
            if doubling:
                lengths = experiment.doublings(int(first), int(last))
            else:
                lengths = [int(length) for length in value.split(",")]
        except ValueError:
            lengths = []
        if not lengths or lengths[0] < 1 or sorted(set(lengths)) != lengths:
            self.fail(f"{value} must be like 128..2048 or 128,192,256, ascending", parameter)
        return tuple(lengths)


class Seeds(click.ParamType):
    """Seeds such as 0..4, or 0,3,5."""

    name = "seeds"

    def convert(self, value, parameter, context) -> tuple[int, ...]:
        first, several, last = value.partition("..")
        try:
            if several:
                seeds = tuple(range(int(first), int(last) + 1))
            else:
                seeds = tuple(int(seed) for seed in value.split(","))
        except ValueError:
            seeds = ()
        if not seeds or min(seeds) < 0:
            self.fail(f"{value} must be like 0..4 or 0,3,5", parameter)
        return seeds


@click.command()
@click.option(
    "--biases", "schemes", default=SCHEMES, show_default=True, help="Comma-separated names."
)
@click.option("--train-length", default=128, show_default=True, type=click.IntRange(1))
@click.option("--eval-lengths", default="128..2048", show_default=True, type=Lengths())
@click.option(
    "--text",
    type=click.Path(exists=True, path_type=Path),
    help="A file, or a folder of files.  [default: the source of Python's library and PyTorch]",
)
@click.option(
    "--size", default="small", show_default=True, type=click.Choice(list(experiment.SIZES))
)
@click.option("--steps", type=click.IntRange(1), help="Training steps.  [default: by size]")
@click.option("--seeds", default="0..2", show_default=True, type=Seeds())
@click.option(
    "--dtype", default="bfloat16", show_default=True, type=click.Choice(list(experiment.DTYPES))
)
@click.option("--device", help="[default: a GPU if available, else cpu]")
@click.option(
    "--objective",
    default="causal",
    show_default=True,
    type=click.Choice(list(experiment.OBJECTIVES)),
    help="causal: models predict the next token. masked: encoders predict masked tokens from both"
    " sides; they have no windows, and their receptive fields are not measured.",
)
@click.option(
    "--output",
    default="extrapolation",
    show_default=True,
    type=click.Path(file_okay=False, path_type=Path),
)
def extrapolate(
    schemes, train_length, eval_lengths, text, size, steps, seeds, dtype, device, objective, output
):
    """Train short, test long: which position schemes extrapolate to longer sequences?

    For each scheme and seed a small language model is trained at one length, and its perplexity
    and receptive fields are measured at other lengths. The size small, of bytes, is for two CPU
    cores, and large, with a vocabulary of tokens, for a GPU. Schemes are the biases, perhaps
    with arguments, as 'alibi(shift=6)', none, sinusoidal, learned, rotary, window(WIDTH), and
    package.module:Class for a bias of your own. The results are written to table.md, results.json,
    results.png and results.html, an interactive plot, in the folder OUTPUT, which also contains
    checkpoints: the same command resumes after an interruption.
    """
    report = needed("extrapolation.experiment.report")
    pictures = needed("extrapolation.experiment.picture")
    chosen = experiment.SIZES[size]
    if steps is not None:
        chosen = dataclasses.replace(chosen, steps=steps)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    names = tuple(split_names(schemes))
    try:
        settings = experiment.Settings(
            names, train_length, eval_lengths, chosen, seeds, dtype, device, objective
        )
        check_device(device)
        read = experiment.read_text(text, chosen.vocabulary)
        experiment.check_text(settings, read)
        output.mkdir(parents=True, exist_ok=True)
    except (OSError, TypeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    try:
        results = experiment.run(settings, read, output)
    except experiment.CheckpointError as error:
        raise click.ClickException(str(error)) from error
    reference = report.Reference.of(settings, read)
    paths = report.write_report(settings, results, reference, output)
    paths += pictures.write(settings, results, reference, output)
    click.echo(paths[0].read_text())
    for path in paths:
        click.echo(f"saved {path}")
