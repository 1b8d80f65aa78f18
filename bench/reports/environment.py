"""The environment of a measurement: machine, versions and commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from biased_flash_attn.cli.machine import gpu as gpu
from biased_flash_attn.cli.machine import host, versions


def machine() -> dict:
    from biased_flash_attn import _C  # may be missing on a machine with a GPU

    return {
        **host(),
        "instruction_set": _C.instruction_set(),
    }


def gpu_versions() -> dict:
    return {
        **versions("biased-flash-attn", "torch", "triton"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def commit() -> str:
    """The current commit, followed by + if files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        here = Path(__file__).parent
        done = subprocess.run(command, cwd=here, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
