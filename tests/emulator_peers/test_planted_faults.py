"""Faults planted into the PTX of kernels that are right: the emulator finds each of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

import emulator
import planted_kernels
import pytest
import torch
from numerics import assert_close_to_float64
from planted_kernels import SavedLaunch

WRONG = "wrong result"
SEEDS = 3


@dataclass(frozen=True)
class Planted:
    """An edit of a kernel's PTX, and what the emulator may say of it."""

    kernel: str  # a launch of planted_kernels, and an architecture
    name: str
    expected: set[str]
    pattern: str
    replacement: str = ""
    which: int | None = None  # of the matches; all where it is left out

    def edit(self, ptx: str) -> str:
        matches = list(re.finditer(self.pattern, ptx, re.MULTILINE))
        assert matches, f"nothing in the PTX is like {self.pattern}"
        chosen = matches if self.which is None else [matches[self.which]]
        for match in reversed(chosen):
            ptx = ptx[: match.start()] + match.expand(self.replacement) + ptx[match.end() :]
        return ptx


BARRIER = r"^\s*bar\.sync\s+0;"
COPY = r"(cp\.async\.cg\.shared\.global \[ %r\d+) \+ 0"
COPIES_DONE = r"cp\.async\.wait_group\s+"
STORE = r"(st\.global\.v4\.b32 \[ %rd\d+) \+ 0"
PRODUCTS_DONE = r"wgmma\.wait_group\.sync\.aligned\s+0;"
FENCE = r"fence\.proxy\.async\.shared::cta;"
SWIZZLE_128, SWIZZLE_64 = str(1 << 62 | 1 << 46 | 64 << 32), str((1 << 46 | 64 << 32) - (1 << 63))

# A pipeline of cp.async, ldmatrix and mma.
OF_PRODUCT = [
    ("a stage is read with no barrier before", {"race", "uninitialized"}, BARRIER, "", 0),
    ("a stage is refilled with no barrier before", {"race"}, BARRIER, "", 2),
    ("the next stage is read with no barrier before", {"race"}, BARRIER, "", 3),
    ("results overwrite a stage with no barrier before", {"race"}, BARRIER, "", -2),
    ("results are read with no barrier before", {"race"}, BARRIER, "", -1),
    ("one more copy may be in flight", {"race"}, COPIES_DONE + "2;", "cp.async.wait_group 3;"),
    ("no copy is waited for", {"race"}, COPIES_DONE + r"\d;"),
    ("copies join no group", {"race"}, r"cp\.async\.commit_group;", "", -1),
    ("a copy lands a row too low", {"race"}, COPY, r"\1 + 64", -1),
    (
        "a copy comes from the row below",
        {WRONG},
        r"(\[ %rd\d+) \+ 0 \], 0x10",
        r"\1 + 416 ], 0x10",
        4,
    ),
    ("rows beyond the end are copied", {"out of bounds"}, r"0x10, %r\d+;", "0x10;"),
    ("a matrix is not transposed", {WRONG}, r"x4\.trans", "x4", 0),
    ("another swizzle", {WRONG}, r"(xor\.b32\s+%r\d+, %r\d+), 32;", r"\1, 64;", 0),
    (
        "two accumulators are exchanged",
        {WRONG},
        r"(mma\.sync[^;]*\}, \{ )(%r\d+), (%r\d+) \}, \{",
        r"\1\3, \2 }, {",
        0,
    ),
    (
        "the rows of a store are those to leave out",
        {"race", "out of bounds"},
        r"@%(p\d+) st\.global",
        r"@!%\1 st.global",
        0,
    ),
    ("rows beyond the end are stored", {"out of bounds"}, r"@%p\d+ st\.global", "st.global"),
    ("a store beyond the tensor", {"out of bounds"}, STORE, r"\1 + 65536", 0),
    ("a store at an odd address", {"misaligned"}, STORE, r"\1 + 2", 0),
]
# Copies, two wgmma and a softmax between them, by two warpgroups.
OF_ATTENTION = [
    ("no proxy fence between stores and a product", {"race"}, FENCE, "", 0),
    ("no proxy fence in the masked loop", {"race"}, FENCE, "", 2),
    ("no fence of registers", {"race"}, r"wgmma\.fence\.sync\.aligned;", "", -1),
    ("scores are used before they are complete", {"in flight"}, PRODUCTS_DONE, "", 0),
    (
        "one more product may be in flight",
        {"in flight"},
        PRODUCTS_DONE,
        "wgmma.wait_group.sync.aligned 1;",
        0,
    ),
    ("a stage is refilled under a product", {"race"}, PRODUCTS_DONE, "", 1),
    ("products join no group", {"in flight"}, r"wgmma\.commit_group\.sync\.aligned;", "", 0),
    ("copies may be in flight", {"race"}, COPIES_DONE + "0;", "cp.async.wait_group 2;"),
    ("another swizzle", {WRONG}, SWIZZLE_128, SWIZZLE_64, 0),
    ("a descriptor of the next columns", {WRONG}, r"(add\.s32\s+%r\d+, %r\d+, )2;", r"\g<1>4;", 0),
    (
        "a product adds to what was not set",
        {"uninitialized"},
        r"(wgmma\.mma_async[^;]*?, )0, 1, 1, 0, 0;",
        r"\g<1>1, 1, 1, 0, 0;",
        0,
    ),
    ("a matrix is transposed", {WRONG}, "1, 1, 0, 0;", "1, 1, 0, 1;", 0),
    (
        "maxima of other lanes",
        {WRONG},
        r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+, )2,",
        r"\g<1>4,",
        0,
    ),
    (
        "half of the lanes are no members",
        {"divergence"},
        r"(shfl\.sync\.bfly\.b32[^;]*, )-1;",
        r"\g<1>65535;",
        0,
    ),
    (
        "an accumulator is dropped",
        {WRONG},
        r"(\bfma\.rn\.f32\s+%r\d+, %r\d+, %r\d+, )%r\d+;",
        r"\g<1>0f00000000;",
        -1,
    ),
    ("a barrier of more threads than there are", {"deadlock"}, BARRIER, "bar.sync 0, 512;", 3),
    ("a barrier of fewer threads than come", {"invalid", "race"}, BARRIER, "bar.sync 0, 128;", 3),
    (
        "rows of queries are stored elsewhere",
        {"race", "uninitialized"},
        r"\[(%r\d+)\+65536\]",
        r"[\1+65664]",
        0,
    ),
    (
        "rows of queries are not stored",
        {"uninitialized"},
        r"^\s*st\.shared\.v4\.b32\s+\[%r\d+\+69632\][^;]*;",
    ),
]
FAULTS = [Planted("product-80", *fault) for fault in OF_PRODUCT]
FAULTS += [Planted("attention-90", *fault) for fault in OF_ATTENTION]


@pytest.fixture(scope="module")
def launches(tmp_path_factory) -> dict[str, SavedLaunch]:
    folder = tmp_path_factory.mktemp("planted")
    return {
        f"{name}-{arch}": launch
        for arch in (80, 90)
        for name, launch in planted_kernels.saved_launches(folder / f"{arch}.pt", arch).items()
    }


def outcome(launch: SavedLaunch, ptx: str, seed: int) -> str:
    """ "" where the result is right, and otherwise what is wrong."""
    (kernel,) = emulator.parse(ptx).kernels.values()
    arguments = launch.arguments + [0] * (len(kernel.parameters) - len(launch.arguments))
    launch.out.fill_(torch.nan)
    try:
        emulator.launch(
            kernel,
            grid=launch.grid,
            arguments=arguments,
            shared_bytes=launch.shared_bytes,
            seed=seed,
        )
        plain = launch.exact.float().to(launch.out.dtype)
        assert_close_to_float64(launch.out, launch.exact, plain, "result")
    except emulator.Fault as fault:
        return fault.kind
    except AssertionError:
        return WRONG
    return ""


@pytest.mark.parametrize("name", ["product-80", "product-90", "attention-80", "attention-90"])
def test_kernel_without_a_fault_is_right(name, launches, seed):
    assert outcome(launches[name], launches[name].ptx, seed) == ""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.kernel}: {f.name}")
def test_planted_fault_is_found(fault, launches, seed):
    """Whether a race shows may depend on the interleaving, so a few are tried."""
    launch = launches[fault.kernel]
    ptx = fault.edit(launch.ptx)
    found = {outcome(launch, ptx, seed + n) for n in range(SEEDS)} - {""}
    assert found, "not found"
    assert found <= fault.expected
