"""Builds the emulator's C++ core if it is missing or older than its sources."""

from __future__ import annotations

import fcntl
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

_HERE = Path(__file__).parent
_BUILD = _HERE.parents[1] / "build" / f"emulator-{sys.implementation.cache_tag}"


def load_core() -> ModuleType:
    """The extension module. Only one process at a time builds it."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    with (_BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (_BUILD / "build.ninja").exists():
            _cmake(
                "-S", _HERE, "-B", _BUILD, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}"
            )
        _cmake("--build", _BUILD)
    (path,) = _BUILD.glob("_core.*.so")
    spec = importlib.util.spec_from_file_location(f"{__package__}._core", path)
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    return core


def _cmake(*arguments) -> None:
    command = ["cmake", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed\n\n{done.stdout}")
