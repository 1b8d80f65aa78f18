"""Checks that settings of experiments have in common."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from ...nn import positions


def check_schemes(schemes: tuple[str, ...], heads: int, dim: int) -> None:
    """Raises ValueError or TypeError unless all schemes can be created, each named once."""
    different = {scheme.removesuffix("()") for scheme in schemes}
    if not schemes or len(different) < len(schemes):
        raise ValueError(f"schemes is {schemes}; it must name one or more, each once")
    for scheme in schemes:
        make = positions(scheme).bias
        if make is not None:
            # The values of its arguments are checked here, not after the schemes before it.
            make(heads, dim)


def check_seeds(seeds: tuple[int, ...]) -> None:
    """Raises ValueError unless there are seeds, each once."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds is {seeds}; it must have one or more, each once")


def check_lengths(lengths: tuple[int, ...], shortest: int = 1) -> None:
    """Raises ValueError unless lengths for evaluation ascend, from `shortest` or more."""
    if not lengths or sorted(set(lengths)) != list(lengths):
        raise ValueError(f"eval_lengths is {lengths}; it must ascend")
    if lengths[0] < shortest:
        raise ValueError(f"eval_lengths is {lengths}; the shortest may be {shortest}")


def check_device(device: str) -> None:
    """Raises ValueError for a device that cannot be used."""
    try:
        torch.zeros(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device is {device!r}, which cannot be used: {reason}") from error


def versions() -> dict[str, str]:
    return {
        "biased_flash_attn": metadata.version("biased-flash-attn"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }
