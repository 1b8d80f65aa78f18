"""Identifies the GPU: its family, and whether the kernels support it."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import NamedTuple

import torch
import triton
from triton.runtime import driver

from .. import tracing
from ..shared_memory import block_bytes
from .refusals import refusal


class Family(Enum):
    """Processors that share configurations: they have the same matrix instructions, and compiled
    kernels use about the same number of registers."""

    AMPERE = "mma.sync"  # data center Ampere, and Jetson Orin
    GEFORCE_AMPERE = "mma.sync, compiled to other code"  # GeForce Ampere, and Ada
    HOPPER = "wgmma"
    BLACKWELL = "tcgen05"  # data center Blackwell, and Jetson Thor
    GEFORCE_BLACKWELL = "mma.sync, compiled by the passes for Blackwell"


# The GPUs whose shared memory the configurations of a family fill.
_FILLED = {
    Family.AMPERE: 80,
    Family.GEFORCE_AMPERE: 86,
    Family.HOPPER: 90,
    Family.BLACKWELL: 100,
    Family.GEFORCE_BLACKWELL: 120,
}


class Processor(NamedTuple):
    """A GPU architecture. backend and arch are Triton's names: ("cuda", 90) is Hopper, ("hip",
    "gfx942") is CDNA 3."""

    backend: str
    arch: int | str
    shared_memory: int  # bytes per block

    @property
    def name(self) -> str:
        """The name of the architecture, such as "sm_90" or "gfx942"."""
        return f"sm_{self.arch}" if self.backend == "cuda" else str(self.arch)

    @property
    def family(self) -> Family | None:
        """The family, or None if the kernels do not support the GPU."""
        if self.backend != "cuda" or self.arch < 80:
            return None
        if self.arch < 90:
            return Family.AMPERE if self.arch in (80, 87) else Family.GEFORCE_AMPERE
        if self.arch < 100:
            return Family.HOPPER
        return Family.BLACKWELL if self.arch < 120 else Family.GEFORCE_BLACKWELL

    @property
    def refusal(self) -> str:
        """The reason why the kernels do not support the GPU, or an empty string."""
        if self.backend != "cuda":
            reason = f"needs an NVIDIA GPU; this one is {self.arch}"
        elif self.family is None:
            reason = (
                f"needs an NVIDIA GPU of sm_80 or newer; this one is {self.name}, for which "
                "Triton has no matrix instructions, neither for float16 nor for bfloat16"
            )
        elif self.shared_memory < (needed := block_bytes(_FILLED[self.family])):
            reason = (
                f"needs {needed / 1024:g} KiB of shared memory per block; this GPU, {self.name}, "
                f"has {self.shared_memory / 1024:g}"
            )
        else:
            return ""
        return f"{reason}. Use backend='reference', or backend='cpu' with tensors on the CPU"


def processor() -> Processor:
    """Returns the current GPU."""
    target = driver.active.get_current_target()
    device = driver.active.get_current_device()
    return Processor(target.backend, target.arch, _shared_memory(device, target.arch))


@cache
def _shared_memory(device: int, arch: int | str) -> int:
    # A driver that stands in for a GPU that is not present cannot be queried.
    utils = getattr(driver.active, "utils", None)
    if utils is None:
        return block_bytes(arch)
    return utils.get_device_properties(device)["max_shared_mem"]


@tracing.constant
def unsupported(device: torch.device) -> str:
    """Returns the reason why the kernels do not run on a device, or an empty string."""
    if triton.knobs.runtime.interpret:
        return "cannot be interpreted, as bfloat16 would be wrong; unset TRITON_INTERPRET"
    if device.type == "cpu":  # an emulated GPU, which runs tests
        return ""
    with torch.cuda.device(device):
        gpu = processor()
    return gpu.refusal or refusal(triton.__version__, gpu.name)
