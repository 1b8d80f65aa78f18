"""Compiles the CUDA C++ sources with NVRTC."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from .. import shared_constants
from . import sources

# The oldest release that a CUDA build of a supported PyTorch depends on.
OLDEST = (12, 6)
SUFFIXES = (".h", ".cuh", ".cu")
INSTALL = "pip install 'biased-flash-attn[cuda]'"


class Kernel(NamedTuple):
    """A compiled kernel: its symbol, and the image of the module that defines it, a cubin or, for
    a virtual architecture, PTX."""

    name: str
    image: bytes


class CompilationError(RuntimeError):
    """NVRTC rejected the sources, or failed."""


@cache
def missing() -> str:
    """Returns the reason why nothing can be compiled, with the remedy, or an empty string."""
    try:
        from cuda.bindings import nvrtc  # noqa: F401
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error}); {INSTALL}"
    try:
        release = version()
    except RuntimeError as error:
        (reason, *_) = str(error).splitlines() or [""]
        return f"the library NVRTC cannot be loaded ({reason}); pip install nvidia-cuda-nvrtc"
    found, oldest = (".".join(map(str, x)) for x in (release, OLDEST))
    if release < OLDEST:
        return f"NVRTC {found} is too old, {oldest} or newer is needed; {INSTALL}"
    major, *_ = (torch.version.cuda or found).split(".")
    if major != str(release[0]):  # the driver need not be able to load the kernels
        return (
            f"NVRTC {found} is of another CUDA release than PyTorch, {torch.version.cuda}; "
            f"pip install 'cuda-bindings=={major}.*'"
        )
    return ""


@cache
def version() -> tuple[int, int]:
    """Returns the release of NVRTC, such as (13, 5)."""
    from cuda.bindings import nvrtc

    return tuple(_checked(nvrtc.nvrtcVersion()))


@cache
def texts() -> dict[str, str]:
    """Returns the text of every source, by the name that #include has."""
    folder = Path(sources.__file__).parent
    paths = sorted(x for x in folder.rglob("*") if x.suffix in SUFFIXES)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def options(architecture: str) -> list[str]:
    """Returns the compiler options for an architecture: "sm_90a", or "compute_90a" for PTX."""
    names = "PLAN_QUERIES", "LARGEST_SUM", "LARGEST_GAIN"
    macros = [f"--define-macro=BFA_{name}={getattr(shared_constants, name)}" for name in names]
    return [f"--gpu-architecture={architecture}", "--std=c++17", "--generate-line-info", *macros]


def compile_kernel(source: str, expression: str, architecture: str) -> Kernel:
    """Compiles the kernel that a C++ expression names, an instance of a template in a source.

    The headers come from memory, so that the compiled text is the one in the cache's key.

    Raises:
        CompilationError: with the compiler's messages.
    """
    from cuda.bindings import nvrtc

    text = texts()
    headers = [name for name in text if name != source]
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            text[source].encode(),
            source.encode(),
            len(headers),
            [text[name].encode() for name in headers],
            [name.encode() for name in headers],
        )
    )
    try:
        _checked(nvrtc.nvrtcAddNameExpression(program, expression.encode()))
        words = [word.encode() for word in options(architecture)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
        if status:
            log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
            raise CompilationError(f"NVRTC cannot compile {expression}:\n{log.decode()}")
        name = _checked(nvrtc.nvrtcGetLoweredName(program, expression.encode())).decode()
        if architecture.startswith("compute_"):
            image = _text(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        else:
            image = _bytes(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        return Kernel(name, image)
    finally:
        _checked(nvrtc.nvrtcDestroyProgram(program))


def _bytes(program, size, content) -> bytes:
    result = b"\0" * _checked(size(program))
    _checked(content(program, result))
    return result


def _text(program, size, content) -> bytes:
    return _bytes(program, size, content).rstrip(b"\0")


def _checked(result: tuple):
    """Returns the values that a call of cuda-bindings returned besides its status."""
    status, *values = result
    if status:
        raise CompilationError(f"NVRTC failed with {status.name}")
    return values[0] if len(values) == 1 else values
