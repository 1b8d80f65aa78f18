"""Triton kernels of other packages: compiled in a process of their own, executed in this one.

`tests/conftest.py` has Triton interpret kernels where there is no GPU, and a process that
interprets cannot compile. So a child process imports the packages and prints the PTX.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, and what it has to compute."""

    kernel: str  # "module:name"
    grid: tuple[int, ...]
    arguments: dict[str, object]  # all parameters by name, constants among them
    expected: dict[str, tuple[Tensor, Tensor]]  # by parameter: in float64, and plainly computed
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})


@dataclass(frozen=True)
class Compiled:
    ptx: str
    shared_bytes: int
    parameters: list[str]  # names of the arguments that the kernel takes at run time


def launches_of(module: str) -> dict[str, Callable[[], Launch]]:
    """The functions of a module that return a launch, by name."""
    functions = inspect.getmembers(importlib.import_module(module), inspect.isfunction)
    return {
        name: made for name, made in functions if made.__annotations__.get("return") == "Launch"
    }


def compile_all(module: str, arch: int) -> dict[str, Compiled]:
    """What Triton compiles for every launch of a module."""
    done = subprocess.run(
        [sys.executable, __file__, module, str(arch)],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return {name: Compiled(**made) for name, made in json.loads(done.stdout).items()}


def execute(compiled: Compiled, launch: Launch, seed: int) -> None:
    """Runs the kernel on the tensors of the launch, in the emulator."""
    import emulator

    (kernel,) = emulator.parse(compiled.ptx).kernels.values()
    arguments = [launch.arguments[name] for name in compiled.parameters]
    # Triton appends pointers to scratch memory, which kernels without descriptors leave alone.
    arguments += [0] * (len(kernel.parameters) - len(arguments))
    grid = (*launch.grid, 1, 1)[:3]
    emulator.launch(
        kernel, grid=grid, arguments=arguments, shared_bytes=compiled.shared_bytes, seed=seed
    )


def compile_one(launch: Launch) -> Compiled:

    module, name = launch.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    while (
        not hasattr(kernel, "arg_names") or hasattr(kernel, "configs") or hasattr(kernel, "values")
    ):
        kernel = kernel.fn  # under decorators that choose a configuration
    binary = kernel.warmup(**launch.arguments, **launch.options, grid=launch.grid)
    kinds = binary.src.signature.items()
    return Compiled(
        binary.asm["ptx"],
        binary.metadata.shared,
        [name for name, kind in kinds if kind != "constexpr"],
    )


def main(module: str, arch: str) -> None:
    launches = {name: make() for name, make in launches_of(module).items()}
    # Imported while no GPU is known, packages ask nothing of torch.cuda.
    for launch in launches.values():
        importlib.import_module(launch.kernel.split(":")[0])
    sys.path.insert(0, str(ROOT / "bench"))
    from triton.runtime import driver

    from compiled import Processor

    driver.set_active(Processor(int(arch)))
    print(json.dumps({name: vars(compile_one(launch)) for name, launch in launches.items()}))


if __name__ == "__main__":
    torch.manual_seed(0)
    main(*sys.argv[1:])
