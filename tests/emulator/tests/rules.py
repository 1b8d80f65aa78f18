"""Kernels that follow a rule of PTX, and violate it without their marked lines."""

from __future__ import annotations

import numpy as np
import pytest

from tests import emulator
from tests.emulator.tests.kernels import kernel_of

SEEDS = range(24)

# Each thread has a word of shared memory at %own. %other is the word of the same lane of another
# warp, and %next that of a neighbouring lane. %mine is the thread's word of the output.
PRELUDE = """
.reg .pred %p<8>;
.reg .b32 %r<32>, %own, %other, %next, %tid, %base, %lane, %warp;
.reg .b64 %rd<16>, %out, %mine;
.reg .f32 %f<32>;
.shared .align 1024 .b8 buffer[8192];
mov.u32 %tid, %tid.x;
and.b32 %lane, %tid, 31;
shr.u32 %warp, %tid, 5;
mov.u32 %base, buffer;
mad.lo.u32 %own, %tid, 4, %base;
xor.b32 %other, %tid, 32;
mad.lo.u32 %other, %other, 4, %base;
xor.b32 %next, %tid, 1;
mad.lo.u32 %next, %next, 4, %base;
ld.param.u64 %out, [out];
mad.wide.u32 %mine, %tid, 4, %out;
"""


def launch(
    body: str, threads: int = 64, grid: int = 1, seed: int = 0, out=None, resident=None
) -> np.ndarray:
    kernel = kernel_of(PRELUDE + body + "\nret;", [".param .u64 out"])
    out = np.zeros(4096, np.uint32) if out is None else out
    emulator.launch(kernel, (grid,), [out], block=(threads,), seed=seed, resident=resident)
    return out


def without(body: str, mark: str = "//!") -> str:
    """The body without its marked lines."""
    lines = body.splitlines()
    assert any(mark in line for line in lines)
    return "\n".join(line for line in lines if mark not in line)


def passes(body: str, **options) -> None:
    """No seed results in a fault."""
    for seed in SEEDS:
        launch(body, seed=seed, **options)


def faults(
    body: str, kind: str | tuple[str, ...], match: str | None = None, **options
) -> emulator.Fault:
    """Every seed results in this kind of fault."""
    for seed in SEEDS:
        with pytest.raises(emulator.Fault, match=match) as found:
            launch(body, seed=seed, **options)
        assert found.value.kind in ((kind,) if isinstance(kind, str) else kind), found.value
    return found.value


def check_rule(
    body: str, kind: str, match: str | None = None, mark: str = "//!", **options
) -> emulator.Fault:
    """The body follows a rule, and violates it without the marked lines."""
    passes(body, **options)
    return faults(without(body, mark), kind, match, **options)
