"""Where a measurement was made, and of what."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch


def machine() -> dict:
    from biased_flash_attn import _C  # which a machine with a GPU may lack

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


def gpu() -> dict:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "driver": driver(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": properties.total_memory // 2**20,
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
    }


def driver() -> str:
    """The version of the GPU's driver, where its tool tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


def versions(*packages: str) -> dict:
    return {"python": platform.python_version(), **{p: metadata.version(p) for p in packages}}


def gpu_versions() -> dict:
    return {
        **versions("biased-flash-attn", "torch", "triton"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def commit() -> str:
    """The commit that is checked out, with a + where files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        here = Path(__file__).parent
        done = subprocess.run(command, cwd=here, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
