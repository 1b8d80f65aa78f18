"""The hardware and the versions of a measurement."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch


def processor() -> str:
    """The name of the processor, and its family and model, if the system provides them.

    Virtual machines often hide the name, and only the numbers tell the generation.
    """
    information = Path("/proc/cpuinfo")
    text = information.read_text() if information.exists() else ""
    if not (name := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)):
        return platform.processor() or platform.machine()
    numbers = re.findall(r"^(cpu family|model)\s*:\s*(\d+)$", text, re.MULTILINE)[:2]
    return ", ".join([name.group(1), *(f"{key} {value}" for key, value in numbers)])


def host() -> dict:
    return {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()}


def gpu() -> dict:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "driver": driver(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_mib": properties.total_memory // 2**20,
        **host(),
    }


def driver() -> str:
    """The version of the GPU driver according to nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()


def versions(*packages: str) -> dict:
    return {"python": platform.python_version(), **{p: metadata.version(p) for p in packages}}
