"""Kernels from memory, from the disk, and from NVRTC."""

from __future__ import annotations

import os
import re
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from biased_flash_attn.cuda_kernels import cache, compiler, nvrtc
from biased_flash_attn.cuda_kernels.nvrtc import Kernel

pytestmark = pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())

TEXTS = {
    "add.cu": '#include "parts/sum.cuh"\n'
    "template <class T, int N> __global__ void add(T* x) { *x = sum(*x, T(N)); }\n",
    "parts/sum.cuh": "template <class T> __device__ T sum(T a, T b) { return a + b; }\n",
}


def variant(n: int = 3) -> SimpleNamespace:
    return SimpleNamespace(source="add.cu", expression=f"add<float, {n}>")


@pytest.fixture(autouse=True)
def sources(monkeypatch, tmp_path):
    """Small sources, an empty cache, and no kernels in memory."""
    monkeypatch.setattr(nvrtc, "texts", lambda: TEXTS)
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    forget(monkeypatch)


def forget(monkeypatch):
    """What a new process does not know."""
    monkeypatch.setattr(compiler, "_kernels", {})


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    """The expressions that were compiled."""
    made, compile_kernel = [], nvrtc.compile_kernel

    def counted(source, expression, architecture):
        made.append(expression)
        return compile_kernel(source, expression, architecture)

    monkeypatch.setattr(nvrtc, "compile_kernel", counted)
    return made


def ptx(n: int = 3) -> Kernel:
    return compiler.compiled(variant(n), "compute_90a")


def files() -> list:
    return sorted(cache.folder().iterdir())


def test_kernels_are_compiled_for_the_architecture():
    cubin = nvrtc.compile_kernel("add.cu", "add<float, 3>", "sm_90a")
    assert cubin.image.startswith(b"\x7fELF")
    assert cubin.name.encode() in cubin.image
    text = ptx().image.decode()
    assert ".target sm_90a" in text
    assert f".entry {ptx().name}(" in text


def test_errors_of_the_compiler_have_its_messages(monkeypatch):
    monkeypatch.setitem(TEXTS, "parts/sum.cuh", "template <class T> __device__ T sum(T, T) { no }")
    with pytest.raises(nvrtc.CompilationError, match=r'add<float, 3>:\nparts/sum\.cuh.*"no"'):
        ptx()


def test_a_kernel_is_compiled_once(monkeypatch, compilations):
    first = ptx()
    assert ptx() is first
    forget(monkeypatch)
    assert ptx() == first
    assert ptx(4) != first
    assert len(compilations) == 2


@pytest.mark.parametrize("what", ["source", "header", "name of a header", "options", "release"])
def test_all_inputs_of_the_compiler_are_in_the_key(monkeypatch, what):
    before = compiler.key_of(variant(), "sm_90a")
    if what == "options":
        monkeypatch.setattr(nvrtc, "options", lambda architecture: [architecture])
    elif what == "release":
        monkeypatch.setattr(nvrtc, "version", lambda: (99, 0))
    elif what == "name of a header":
        names = {"parts/sum.cuh": "parts/product.cuh"}
        renamed = {names.get(name, name): text for name, text in TEXTS.items()}
        monkeypatch.setattr(nvrtc, "texts", lambda: renamed)
    else:
        monkeypatch.setitem(TEXTS, {"source": "add.cu", "header": "parts/sum.cuh"}[what], "")
    keys = before, compiler.key_of(variant(), "sm_90a"), compiler.key_of(variant(4), "sm_90a")
    assert len({*keys, compiler.key_of(variant(), "compute_90a")}) == 4


@pytest.mark.parametrize("damage", ["empty", "truncated", "a bit", "another kernel", "a folder"])
def test_files_that_are_not_intact_are_not_used(monkeypatch, compilations, damage):
    kernel = ptx()
    (path,) = files()
    content = path.read_bytes()
    if damage == "a bit":
        flipped = len(content) // 2
        path.write_bytes(content[:flipped] + bytes([content[flipped] ^ 4]) + content[flipped + 1 :])
    elif damage == "another kernel":
        ptx(4)
        (other,) = set(files()) - {path}
        os.replace(other, path)
    elif damage == "a folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(b"" if damage == "empty" else content[:-1])
    forget(monkeypatch)
    compilations.clear()
    assert ptx() == kernel
    assert len(compilations) == 1
    if damage != "a folder":
        assert path.read_bytes() == content
    assert all(x.suffix == ".kernel" for x in files())


def full_disk(path, content):
    """Writes a part of the content, as a full disk does."""
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("failing", ["writing", "renaming", "the folder", "the home directory"])
def test_disks_that_cannot_be_written_leave_nothing_behind(monkeypatch, tmp_path, failing):
    def fails(*_):
        raise PermissionError(13, "Permission denied")

    if failing == "writing":
        monkeypatch.setattr(cache.Path, "write_bytes", full_disk)
    elif failing == "renaming":
        monkeypatch.setattr(os, "replace", fails)
    elif failing == "the folder":
        (tmp_path / "cache").write_text("a file")
    else:
        monkeypatch.delenv(cache.FOLDER_VARIABLE)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

        def homeless():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(cache.Path, "home", homeless)
    assert ".entry" in ptx().image.decode()
    left = [x for x in tmp_path.rglob("*") if x.is_file()]
    assert left == ([tmp_path / "cache"] if failing == "the folder" else [])


def test_threads_compile_a_kernel_once(compilations):
    found = []
    threads = [threading.Thread(target=lambda: found.append(ptx())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compilations) == 1
    assert len(found) == 4


def test_the_cache_is_in_the_users_cache_directory_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.FOLDER_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "biased_flash_attn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.folder() == cache.Path.home() / ".cache" / "biased_flash_attn"


@pytest.mark.parametrize("seconds", [0.0, 60.0])
def test_only_long_compilations_are_announced(monkeypatch, capsys, seconds):
    monkeypatch.setattr(compiler, "_PATIENCE", seconds)
    with compiler.announced("Linear, Bfloat16, head_dim 64, 64"):
        for timer in threading.enumerate() if not seconds else ():
            if isinstance(timer, threading.Timer):
                timer.join()
    assert ("compiling a kernel (Linear" in capsys.readouterr().err) == (not seconds)


@pytest.mark.parametrize(
    ("cause", "reason", "remedy"),
    [
        ("no package", "cuda-bindings cannot be imported .*", "'biased-flash-attn[cuda]'"),
        ("no library", r"the library NVRTC .* \(libnvrtc was not found\)", "nvidia-cuda-nvrtc"),
        ("old library", "NVRTC 11.8 is too old, 12.6 .*", "'biased-flash-attn[cuda]'"),
        ("other release", "NVRTC 13.0 is .* than PyTorch, 12.8", "'cuda-bindings==12.*'"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(monkeypatch, cause, reason, remedy):
    def version():
        if cause == "no library":
            raise RuntimeError("libnvrtc was not found\nin any folder")
        return (13, 0) if cause == "other release" else (11, 8)

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(nvrtc, "version", version)
    if cause == "no package":
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    found = nvrtc.missing.__wrapped__()
    assert re.fullmatch(f"{reason}; pip install {re.escape(remedy)}", found)
