"""`check`: whether this machine computes correct results, and how fast."""

from __future__ import annotations

import secrets
import sys
import time
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .. import backends
from .checking import report, sizes
from .checking.accuracy import Row, described
from .checking.forms import FORMS, TIMED
from .checking.problems import BATCH, CALLS, DTYPES, HEADS
from .checking.processes import OUT_OF_TIME, Ended, OutOfMemory, Settings, spread
from .checking.timing import Timing

WIDTH_OF_TABLE = 100
NOT_FINISHED = 3  # 1 is for failures, 2 for a wrong option
SHORTEST = 64  # enough for a prompt in decoding and for different packed lengths


@click.command()
@click.option(
    "--backend",
    type=click.Choice(backends.NAMES),
    help="The backend to check; by default that of the GPU or, without a GPU, of the CPU.",
)
@click.option("--seed", type=click.IntRange(0), help="Repeat an earlier check with its seed.")
@click.option(
    "--length",
    type=click.IntRange(SHORTEST),
    help="Tokens of a sequence; by default as many as fit into two minutes.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(sizes.MINUTES),
    default=sizes.MINUTES,
    show_default=True,
    help="The time limit; more for a machine that is busy or has to compile many kernels.",
)
@click.option(
    "--report",
    "path",
    default="check-report.md",
    show_default=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
)
def check(backend: str | None, seed: int | None, length: int | None, minutes: float, path: Path):
    """Check that this machine computes correct results, and how fast.

    Every form of bias is computed on the GPU, or on the CPU without a GPU: outputs and all
    gradients, causal and bidirectional, packed and decoding, in float32, bfloat16 and float16.
    Errors against float64 may be twice those of naive attention in the same dtype, plus rounding.
    Forward and backward passes are timed next to PyTorch's scaled_dot_product_attention and
    FlexAttention. The report contains everything that a bug report needs. The exit status is 0 if
    the machine can be trusted, 1 if it cannot, and 3 if the time was over before all checks had run
    and those that ran passed.
    """
    begin = time.time()
    if not path.parent.is_dir():  # checked now rather than at the end
        raise click.BadParameter(f"there is no folder {path.parent}", param_hint="--report")
    backend, device = choose(backend)
    console = Console(width=None if sys.stdout.isatty() else WIDTH_OF_TABLE)
    seed = secrets.randbelow(2**32) if seed is None else seed
    seconds = minutes * sizes.SECONDS_PER_MINUTE
    settings = make_settings(backend, device, seed, length, begin, seconds)
    about = {**report.environment(device, backend), "seed": seed, "length": settings.length}
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)

    findings = collect(settings, begin + seconds, console)
    about["seconds"] = round(time.time() - begin)
    what = (
        f"{BATCH} x {HEADS} heads of {settings.timed_head_dim}, {settings.timed_length} tokens, "
        f"{settings.timed_dtype}, causal"
    )
    console.print(report.accuracy_table(findings))
    console.print(report.timing_table(findings, what))
    for text in (*report.notes(findings), *findings.reasons()):
        console.print(f"- {escape(text)}", highlight=False)
    path.write_text(report.markdown(findings, about, what))
    console.print(f"{about['seconds']} s; the report: {escape(str(path))}", highlight=False)
    if findings.unfinished:
        raise not_finished(findings, minutes)
    if not findings.trusted:
        raise click.ClickException(f"{findings.verdict()} Attach {path} to a bug report.")
    console.print(findings.verdict(), style="bold green", soft_wrap=True, highlight=False)


def choose(backend: str | None) -> tuple[str, str]:
    """The backend to check, and the device that it runs on."""
    on_gpu = torch.cuda.is_available()
    name = backend or ("triton" if on_gpu else "cpu")
    found = next(one for one in backends.report() if one.name == name)
    if not found.available:
        raise click.ClickException(f"the {name} backend cannot run here: {found.detail}")
    on_cpu = name == "cpu"
    return name, "cuda" if on_gpu and not on_cpu else "cpu"


def make_settings(
    backend: str, device: str, seed: int, length: int | None, begin: float, seconds: float
) -> Settings:
    timed = sizes.timed(device)
    try:
        fitting = length or sizes.fitting_length(device, seed)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(described(error)) from error
    return Settings(
        tuple(FORMS),
        backend,
        device,
        seed,
        fitting,
        length or timed.length,
        timed.dtype,
        timed.head_dim,
        begin + sizes.LAST_ROW[device] * seconds,
        begin + sizes.LAST_PEER[device] * seconds,
    )


def collect(settings: Settings, end: float, console: Console) -> report.Findings:
    """Collects the results of the processes, with a progress bar."""
    findings = report.Findings(settings.backend)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        total = len(FORMS) * len(CALLS) * len(DTYPES) + len(TIMED)
        task = progress.add_task("starting", total=total)
        for event in spread(settings, sizes.processes(settings.device), end):
            if isinstance(event, OutOfMemory):
                raise out_of_memory(event.reason)
            if isinstance(event, Row):
                findings.rows.append(event)
                what = f"{event.form}, {event.call}, {event.dtype}"
            elif isinstance(event, Timing):
                findings.timings.append(event)
                what = f"timing {event.form}"
            elif isinstance(event, Ended):
                findings.problems.append(f"{event.task}: {event.reason}")
                findings.crashes += event.reason != OUT_OF_TIME
                continue
            progress.update(task, description=what, advance=1)
    return findings


def out_of_memory(reason: str) -> click.ClickException:
    return click.ClickException(
        f"out of memory, so this machine could not be checked ({reason}); end other programs that "
        "use the memory, or pass a smaller --length"
    )


def not_finished(findings: report.Findings, minutes: float) -> click.ClickException:
    error = click.ClickException(
        f"{findings.verdict()} Run it again with --minutes {2 * minutes:g} (compiled kernels are"
        " kept), on an idle machine, or with a smaller --length."
    )
    error.exit_code = NOT_FINISHED
    return error
