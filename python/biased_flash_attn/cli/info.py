"""`info`: the backends of this machine."""

import platform
from importlib import metadata, resources

import click
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import backends


@click.command()
def info():
    """Show versions, this machine and its backends."""
    console = Console()
    facts = Table(show_header=False, box=None)
    facts.add_row("biased-flash-attn", metadata.version("biased-flash-attn"))
    facts.add_row("torch", torch.__version__)
    facts.add_row("python", platform.python_version())
    facts.add_row("system", platform.platform())
    capability = torch.backends.cpu.get_cpu_capability()
    threads = torch.get_num_threads()
    facts.add_row("processor", f"{platform.machine()} with {capability}, {threads} threads")
    console.print(facts)

    table = Table("backend", "available", "detail", title="Backends")
    for backend in backends.report():
        available = "[green]yes" if backend.available else "[red]no"
        table.add_row(backend.name, available, escape(backend.detail))
    console.print(table)

    build_error = resources.files("biased_flash_attn") / "_build_error.txt"
    if build_error.is_file():
        console.rule("Why the C++ kernels were not built")
        console.print(build_error.read_text(), markup=False, highlight=False)
