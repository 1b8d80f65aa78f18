"""Where a measurement was made, and of what."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

from biased_flash_attn import _C

PACKAGES = ("biased-flash-attn", "torch", "pytest-benchmark")


def machine() -> dict:
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "instruction_set": _C.instruction_set(),
        "system": platform.platform(),
    }


def processor() -> str:
    """The model, where Linux tells it."""
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return model.group(1) if model else platform.processor() or platform.machine()


def versions() -> dict:
    return {"python": platform.python_version(), **{p: metadata.version(p) for p in PACKAGES}}


def commit() -> str:
    """The commit that is checked out, with a + where files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        here = Path(__file__).parent
        done = subprocess.run(command, cwd=here, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
