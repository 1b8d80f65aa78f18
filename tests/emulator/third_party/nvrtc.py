"""Compiles CUDA C++ to PTX with NVRTC and NVIDIA's headers, all from PyPI packages."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from pathlib import Path


def compile_to_ptx(source: Path, arch: str, *options: str) -> str:
    """The PTX of a source file that may include the headers of CUDA, CUB and CUTLASS."""
    nvrtc = library()
    program = ctypes.c_void_p()
    text = source.read_bytes()
    check(
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, source.name.encode(), 0, None, None)
    )
    try:
        words = [f"--gpu-architecture={arch}", "--std=c++17", "--generate-line-info", *options]
        words += [f"--include-path={folder}" for folder in include_folders()]
        array = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        if nvrtc.nvrtcCompileProgram(program, len(words), array):
            sizes, logs = nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog
            raise RuntimeError(text_of(sizes, logs, program))
        return text_of(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(toolkit() / "lib" / "libnvrtc.so.13"))


def toolkit() -> Path:
    """The folder that the packages nvidia-cuda-* of CUDA 13 share."""
    for folder in importlib.util.find_spec("nvidia").submodule_search_locations:
        if (Path(folder) / "cu13" / "lib" / "libnvrtc.so.13").exists():
            return Path(folder) / "cu13"
    raise ModuleNotFoundError("libnvrtc.so.13 of the package nvidia-cuda-nvrtc was not found")


def include_folders() -> list[Path]:
    include = toolkit() / "include"
    cutlass = Path(importlib.util.find_spec("cutlass_library").origin).parent
    return [include, include / "cccl", cutlass / "source" / "include"]


def text_of(size_function, text_function, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    check(size_function(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    check(text_function(program, text))
    return text.value.decode()


def check(status: int) -> None:
    if status:
        describe = library().nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        raise RuntimeError(describe(status).decode())
