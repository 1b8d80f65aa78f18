"""Random matrices for tests of the emulator, and the registers that contain them."""

from __future__ import annotations

import numpy as np

from tests.emulator.tests.number_formats import decoded

# Bytes of each type.
BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}


def random_bits(type_: str, *shape: int) -> np.ndarray:
    """Small numbers, whose sums of products are exact in f32 and almost exact in f16."""
    if type_ in ("s8", "u8"):
        return np.random.randint(0, 256, shape).astype(np.uint8)
    small = np.random.randint(-4, 5, shape).astype(np.float32)
    if type_ == "f16":
        return small.astype(np.float16).view(np.uint16)
    if type_ in ("bf16", "tf32"):
        bits = small.view(np.uint32)
        return (bits >> 16).astype(np.uint16) if type_ == "bf16" else bits
    codes = np.array([b for b in range(256) if abs(decoded(np.uint8(b), type_)) in range(5)])
    return np.random.choice(codes, shape).astype(np.uint8)


def values(bits: np.ndarray, type_: str) -> np.ndarray:
    if type_ in ("s8", "u8"):
        return bits.view(np.int8 if type_ == "s8" else np.uint8).astype(float)
    if type_ == "tf32":
        return bits.view(np.float32).astype(float)
    return decoded(bits, type_)


def packed(elements: np.ndarray) -> np.ndarray:
    """Packs the last axis of elements into registers of 32 bits."""
    return np.ascontiguousarray(elements).view(np.uint32)


def a_registers(a: np.ndarray) -> np.ndarray:
    """The fragment of a matrix of 16 rows: [lanes, registers].

    In CuTe's notation, ((4, 8), (n, 2, 2)) threads and values to (row, column), for n elements per
    register.
    """
    n = 4 // a.itemsize
    depth = a.shape[1]
    parts = a.reshape(2, 8, depth // (4 * n), 4, n)  # half, row, group, thread of four, element
    return packed(parts.transpose(1, 3, 2, 0, 4).reshape(32, -1))


def b_registers(b: np.ndarray) -> np.ndarray:
    """The fragment of a matrix of 8 columns, given as [column, depth]: [lanes, registers]."""
    n = 4 // b.itemsize
    parts = b.reshape(8, b.shape[1] // (4 * n), 4, n)
    return packed(parts.transpose(0, 2, 1, 3).reshape(32, -1))


def sum_registers(c: np.ndarray) -> np.ndarray:
    """The fragment of sums of 16 rows: each lane has two of 8 columns of two rows."""
    parts = c.reshape(2, 8, c.shape[1] // 8, 4, 2)
    return packed(parts.transpose(1, 3, 2, 0, 4).reshape(32, -1))


def sums_of(registers: np.ndarray, columns: int, dtype) -> np.ndarray:
    parts = np.ascontiguousarray(registers).view(dtype).reshape(8, 4, columns // 8, 2, 2)
    return parts.transpose(3, 0, 2, 1, 4).reshape(16, columns)


SUMS = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


def names(prefix: str, n: int) -> str:
    return "{" + ", ".join(f"%{prefix}{i}" for i in range(n)) + "}"
