"""Launches of Triton kernels of other packages."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from tests.emulator.triton_device import triton_device


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel, and its expected results."""

    kernel: str  # "module:name"
    grid: tuple[int, ...]
    arguments: dict[str, object]  # by the names of parameters, including constants
    expected: dict[str, tuple[Tensor, Tensor]]  # by parameter: in float64, and by naive arithmetic
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})


def launches_of(module: str) -> dict[str, Callable[[], Launch]]:
    """The functions of a module that return a launch, by name."""
    functions = inspect.getmembers(importlib.import_module(module), inspect.isfunction)
    returned = {name: made.__annotations__.get("return") for name, made in functions}
    return {name: made for name, made in functions if returned[name] == "Launch"}


def execute(launch: Launch, arch: int, seed: int) -> None:
    """Compiles the kernel for an architecture and runs it in the emulator."""
    kernel = kernel_named(launch.kernel)
    with triton_device(arch, seed):
        kernel[launch.grid](**launch.arguments, **launch.options, enable_fp_fusion=True)


def compiled(launch: Launch, arch: int) -> CompiledKernel:
    """The kernel, compiled but not run."""
    call = {"grid": launch.grid, "warmup": True, **launch.arguments, **launch.options}
    with triton_device(arch):
        return kernel_named(launch.kernel).run(**call, enable_fp_fusion=True)


def kernel_named(name: str) -> JITFunction:
    module, _, attribute = name.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the missing GPU
        kernel = getattr(importlib.import_module(module), attribute)
    while not isinstance(kernel, JITFunction):
        kernel = kernel.fn  # under decorators that choose a configuration
    return kernel
