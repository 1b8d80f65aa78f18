"""The list of Triton releases that miscompile these kernels.

A release is listed if a kernel of this package, compiled by it, was found to violate the PTX ISA,
so that its results may be wrong. The backend then refuses to run with that release.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """A range of releases, `first` to `last` inclusive, for some architectures or for all."""

    first: str
    last: str
    reason: str  # what goes wrong
    remedy: str  # what to install
    architectures: frozenset[str] | None = None  # such as "sm_90" or "gfx942"; None for all

    def applies(self, version: str, architecture: str) -> bool:
        concerned = self.architectures is None or architecture in self.architectures
        return concerned and release(self.first) <= release(version) <= release(self.last)


OLDEST = "3.5.0"  # the first release with the functions that the kernels call
HOPPER = frozenset({"sm_90"})
BLACKWELL = frozenset({"sm_100", "sm_103", "sm_110"})  # those with tcgen05

# Found by executing the kernels of each release in the emulator of the tests (docs/backends.md).
# Matrix units read shared memory through the asynchronous proxy, which sees what threads have
# stored or copied there only after a fence. On Hopper, releases up to 3.7.0 have none in loops in
# which every product needs one. In 3.7.1 passes for dK and dV read registers that an asynchronous
# wgmma also reads, before they wait for it; later releases copy the registers. On Blackwell,
# releases up to 3.5.1 leave the version in matrix descriptors 0, where tcgen05 has 1. Those up to
# 3.8.0 have the fence in front of the wait for the copies that it is to follow, and up to 3.7.1
# some kernels do not compile.
REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "3.5.0",
        "3.7.0",
        reason="it leaves out a fence between a copy to shared memory and the wgmma that reads it",
        remedy="install triton 3.8.0 or newer",
        architectures=HOPPER,
    ),
    Refusal(
        "3.7.1",
        "3.7.1",
        reason="it generates kernels that use registers of a wgmma before waiting for it",
        remedy="install triton 3.8.0 or newer",
        architectures=HOPPER,
    ),
    Refusal(
        "3.5.0",
        "3.5.1",
        reason="its matrix descriptors for tcgen05.mma have the wrong version",
        remedy="install triton 3.9.0 or newer",
        architectures=BLACKWELL,
    ),
    Refusal(
        "3.6.0",
        "3.8.0",
        reason="it leaves out a fence between a copy to shared memory and the tcgen05.mma that"
        " reads it",
        remedy="install triton 3.9.0 or newer",
        architectures=BLACKWELL,
    ),
)


def refusal(version: str, architecture: str) -> str:
    """Returns the reason why a release of Triton is refused on an architecture, and the remedy, or
    an empty string."""
    for entry in REFUSALS:
        if entry.applies(version, architecture):
            return f"refuses Triton {version} on {architecture}: {entry.reason}; {entry.remedy}"
    return ""


def release(version: str) -> tuple[int, ...]:
    """Returns the release numbers of a version: (3, 7, 1) for "3.7.1+git1234"."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
