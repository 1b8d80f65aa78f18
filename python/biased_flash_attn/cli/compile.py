"""`compile`: compiles the CUDA kernels ahead of their first use."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor, as_completed

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..cuda_kernels import cache, nvrtc
from ..cuda_kernels.compiler import ensure_stored
from ..cuda_kernels.driver import CudaDriver
from ..cuda_kernels.variants import CHANNELS, padded, usual


@click.command("compile")
@click.option(
    "--head-dim",
    "head_dims",
    multiple=True,
    type=click.IntRange(1, CHANNELS[-1]),
    help="Compile for this number of channels only; may be repeated. [default: all]",
)
def compile_kernels(head_dims: tuple[int, ...]):
    """Compile the CUDA kernels for Hopper GPUs, which are otherwise compiled at their first use.

    No GPU is needed. Kernels are stored in the folder BIASED_FLASH_ATTN_CACHE_DIR or, by default,
    in biased_flash_attn in the user's cache directory, and those that are there already are kept.
    """
    if reason := nvrtc.missing():
        raise click.ClickException(f"the CUDA kernels cannot be compiled: {reason}")
    variants = list(usual(tuple(sorted({padded(x) for x in head_dims})) or CHANNELS))
    console, compiled = Console(), 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    pool = ThreadPoolExecutor(os.cpu_count())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress, pool:
        task = progress.add_task("compiling", total=len(variants))
        architecture = CudaDriver.architecture
        jobs = [pool.submit(ensure_stored, variant, architecture) for variant in variants]
        try:
            for job in as_completed(jobs):
                compiled += job.result()
                progress.advance(task)
        except (OSError, RuntimeError) as error:
            pool.shutdown(cancel_futures=True)
            raise click.ClickException(str(error)) from error
    console.print(
        f"{len(variants)} kernels are in {escape(str(cache.folder()))}; {compiled} of them are new",
        highlight=False,
        soft_wrap=True,
    )
