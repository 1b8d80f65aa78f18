"""The parameters of the kernels: the structures of csrc/cuda/params.h, field by field."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

from torch import Tensor

_ALIGNMENT = 64  # of tensor maps, and so of structures that contain some
UNBOUNDED = 2**30  # a window longer than any sequence


class Rows(ctypes.Structure):
    """Strides count elements; 0 broadcasts."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64))

    @classmethod
    def of(cls, x: Tensor | None) -> Rows:
        """Returns the address and strides of x (B or 1, H or 1), with or without rows."""
        if x is None:
            return cls()
        batch, head = (0 if x.shape[n] == 1 else x.stride(n) for n in (0, 1))
        return cls(x.data_ptr(), batch, head, x.stride(2) if x.dim() > 2 else 0)


class Plan(ctypes.Structure):
    _fields_ = (
        *(("first_key", Rows), ("end_key", c_void_p)),
        *(("first_query", Rows), ("end_query", c_void_p)),
    )


class Problem(ctypes.Structure):
    _fields_ = (
        *[(name, c_int32) for name in ("heads", "group", "n_query", "n_key", "shift", "window")],
        *[(name, c_int32) for name in ("causal", "packed", "blocks")],
        ("scale", c_float),
        ("sequences", c_void_p),
        ("plan", Plan),
        ("order", c_void_p),
    )


class Bias(ctypes.Structure):
    _fields_ = (
        *[(name, Rows) for name in ("slopes", "table", "high", "low", "gain")],
        *[(name, Rows) for name in ("query_vectors", "distance_vectors")],
        *[(name, c_int32) for name in ("columns", "extends")],
    )


class TensorMap(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 16),)


class ForwardParams(ctypes.Structure):
    _fields_ = (
        *[(name, TensorMap) for name in "qkv"],
        ("problem", Problem),
        ("bias", Bias),
        ("o", Rows),
        *[(name, Rows) for name in ("lse", "pivot", "log_sum")],
        ("value_dim", c_int32),
        ("programs", c_int32),
        ("tickets", c_void_p),
    )


class DeltaParams(ctypes.Structure):
    _fields_ = (
        *[(name, Rows) for name in ("o", "grad_o", "pivot", "log_sum", "grad_lse")],
        *[(name, Rows) for name in ("lse_in_base_2", "delta")],
        *[(name, c_int32) for name in ("batch", "heads", "rows", "value_dim")],
    )


class BackwardParams(ctypes.Structure):
    _fields_ = (
        *[(name, TensorMap) for name in ("q", "k", "v", "grad_o")],
        ("problem", Problem),
        ("bias", Bias),
        *[(name, Rows) for name in ("lse_in_base_2", "delta", "grad_q", "grad_k", "grad_v")],
        *[(name, Rows) for name in ("grad_gain", "grad_query_sums", "grad_key_sums")],
        *[(name, Rows) for name in ("grad_table", "grad_query_vectors")],
        *[(name, c_int32) for name in ("slots", "head_dim", "value_dim", "tiles")],
        *[(name, c_void_p) for name in ("query_sums", "turns", "tickets")],
    )


def encoded(parameters: ctypes.Structure) -> bytes:
    """Returns the bytes of a kernel's parameters, as many as its structure has in C++."""
    content = bytes(parameters)
    alignment = _ALIGNMENT if isinstance(parameters, (ForwardParams, BackwardParams)) else 1
    return content.ljust(-(-len(content) // alignment) * alignment, b"\0")
