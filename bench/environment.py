"""Where a measurement was made, and of what."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch

from biased_flash_attn.cli.machine import gpu as gpu
from biased_flash_attn.cli.machine import host, versions


def machine() -> dict:
    from biased_flash_attn import _C  # which a machine with a GPU may lack

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
    """The commit that is checked out, with a + where files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        here = Path(__file__).parent
        done = subprocess.run(command, cwd=here, capture_output=True, check=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
