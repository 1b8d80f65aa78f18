"""The emulator finds each fault that is planted into the PTX of correct kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="needs Triton")

from tests.emulator.third_party import planted_kernels
from tests.emulator.third_party.planted import WRONG, Planted

# The memory beyond a tensor may belong to a tensor that other blocks access.
OUTSIDE = {"out of bounds", "race"}
BARRIER = r"^\s*bar\.sync\s+0;"
COPY = r"(cp\.async\.cg\.shared\.global \[ %r\d+) \+ 0"
COPIES_DONE = r"cp\.async\.wait_group\s+"
STORE = r"(st\.global\.v4\.b32 \[ %rd\d+) \+ 0"
PRODUCTS_DONE = r"wgmma\.wait_group\.sync\.aligned\s+0;"
FENCE = r"fence\.proxy\.async\.shared::cta;"
# The first fields of descriptors: the swizzle, a stride of 64 * 16 bytes, and one of 16.
SWIZZLE_128, SWIZZLE_64 = "4611686293305294848", "-9223371761976868864"

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
        "a store has the inverted mask",
        OUTSIDE,
        r"@%(p\d+) st\.global",
        r"@!%\1 st.global",
        0,
    ),
    (
        "rows beyond the end are stored",
        {"out of bounds", "race"},
        r"@%p\d+ st\.global",
        "st.global",
    ),
    ("a store beyond the tensor", OUTSIDE, STORE, r"\1 + 65536", 0),
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
    ("a barrier of fewer threads than arrive", {"invalid", "race"}, BARRIER, "bar.sync 0, 128;", 3),
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
def targets():
    return planted_kernels.targets(80) | planted_kernels.targets(90)


@pytest.mark.parametrize("name", ["product-80", "product-90", "attention-80", "attention-90"])
def test_unmodified_kernels_are_correct(name, targets, seed):
    assert targets[name].outcomes(targets[name].ptx, seed) == set()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.target}: {fault.name}")
def test_planted_fault_is_found(fault, targets, seed):
    target = targets[fault.target]
    assert target.first_fault(fault.edit(target.ptx), seed) in fault.expected
