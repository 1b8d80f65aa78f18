"""`demo`: every bias on real text, compared with the alternatives."""

import sys

import click
import torch
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from ..biases import NAMED
from ..nn.named_biases import make
from .baselines import dense_mask, fits_memory
from .plot import bias_of, needed
from .text import embedded, library_source
from .trial import Trial, trial

HEAD_DIM = 64
WIDTH_OF_TABLE = 100


@click.command()
@click.option("--length", default=4096, show_default=True, type=click.IntRange(32))
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1))
@click.option(
    "--dtype",
    default="float32",
    show_default=True,
    type=click.Choice(["float32", "bfloat16", "float16"]),
)
@click.option("--output", default="biases.png", show_default=True, type=click.Path(dir_okay=False))
def demo(length: int, heads: int, dtype: str, output: str):
    """Run an attention layer forward and backward with every bias, on real text.

    The text is the source code of Python's standard library. Outputs and gradients are checked
    against float64, and time and memory are compared with attention in plain PyTorch and with
    scaled_dot_product_attention given the bias as a dense mask.
    """
    pictures = needed("extrapolation.pictures")
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_TABLE)
    layer = embedded(library_source(length), heads, HEAD_DIM, getattr(torch, dtype))
    torch.manual_seed(0)
    modules = {name: make(kind, heads, heads * HEAD_DIM) for name, kind in NAMED.items()}
    mask = None
    if fits_memory(heads, length, layer.q.dtype):
        mask = dense_mask(bias_of(modules["alibi"], layer, length), length, layer.q.dtype)

    trials = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(modules))
        for name, module in modules.items():
            progress.update(task, description=name)
            trials[name] = trial(module, layer, mask)
            progress.advance(task)
    console.print(f"{length} bytes of text, {heads} heads of {HEAD_DIM}, {dtype}")
    console.print(table(trials))

    biases = {name: bias_of(module, layer, 1) for name, module in modules.items()}
    curves = {name: pictures.curves(bias, length) for name, bias in biases.items()}
    pictures.all_biases(curves).savefig(output, dpi=120)
    console.print(f"The curves of the biases: {output}")

    failed = [name for name, result in trials.items() if not result.passed]
    if failed:
        raise click.ClickException(f"errors larger than tolerated: {', '.join(failed)}")
    console.print(f"All {len(trials)} biases agree with float64, outputs and gradients.")


def table(trials: dict[str, Trial]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("bias\n", no_wrap=True)
    headings = ("error\noutput", "\ngrads")
    headings += ("seconds\nours", "\nnaive", "\nSDPA", "MiB\nours", "\nnaive", "\nSDPA")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, result in trials.items():
        color = "green" if result.passed else "red"
        costs = (result.ours, result.naive, result.sdpa)
        table.add_row(
            name,
            f"[{color}]{result.output_error:.0e}",
            f"[{color}]{result.gradient_error:.0e}",
            *cost_cells([cost and cost.seconds for cost in costs], digits=2),
            *cost_cells([cost and cost.mebibytes for cost in costs], digits=0),
        )
    return table


def cost_cells(costs: list[float | None], digits: int) -> list[str]:
    """Our cost, then the others with their ratio to it, or a dash if not measured."""
    ours = costs[0]
    cells = ["-" if ours is None else f"{ours:.{digits}f}"]
    for theirs in costs[1:]:
        cells.append("-" if theirs is None else f"{theirs:.{digits}f} {theirs / ours:4.1f}x")
    return cells
