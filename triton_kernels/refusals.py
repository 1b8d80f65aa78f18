"""The list of Triton releases that miscompile these kernels.

A release is listed if a kernel of this package, compiled by it, was found to compute wrong results.
The backend then refuses to run with that release.
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


# Found by executing the compiled kernels in the emulator of the tests. Up to 3.7.0 the fence is
# hoisted out of the loop whose copies it must follow; kernels of distance tables are among those
# affected. In 3.7.1 passes for dK and dV read registers that an asynchronous wgmma also reads,
# before they wait for it, which the PTX ISA leaves undefined; later releases copy the registers.
REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "3.6.0",
        "3.7.0",
        reason="it leaves out a fence between a copy to shared memory and the wgmma that reads it",
        remedy="install triton 3.8.0 or newer",
        architectures=frozenset({"sm_90"}),
    ),
    Refusal(
        "3.7.1",
        "3.7.1",
        reason="it generates kernels that use registers of a wgmma before waiting for it",
        remedy="install triton 3.8.0 or newer",
        architectures=frozenset({"sm_90"}),
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
