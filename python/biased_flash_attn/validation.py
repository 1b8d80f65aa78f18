"""Validates the arguments of the public calls: errors name the argument, before any work is
done."""

from __future__ import annotations

import operator
import sys
import types

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .forms import Form, Geometry

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 512


LAYOUT = "(batch, heads, sequence, head_dim)"


def check_each(tensors: dict[str, Tensor], layout: str = LAYOUT) -> None:
    """Validates each tensor of a call, and its dtype and device against those of the first."""
    (first, q), *_ = tensors.items()
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        if x.is_nested or x.layout != torch.strided:
            raise TypeError(f"{name} is a nested or sparse tensor; it must be a dense one")
        if x.dim() != layout.count(",") + 1:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {layout}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; it may be float64, float32, bfloat16 or float16")
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name} is {x.dtype} and {first} is {q.dtype}; they must have one dtype"
            )
        if x.device != q.device:
            raise ValueError(
                f"{name} is on {x.device} and {first} on {q.device}; they must share one"
            )
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"{name} has head_dim {x.shape[-1]}; it may be 1 to {MAX_HEAD_DIM}")
        if x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0:
            raise ValueError(
                f"{name} has stride {x.stride(-1)} in its last dimension; it must be contiguous"
                f" there: pass {name}.contiguous()"
            )


def check_heads(
    q: Tensor, k: Tensor, heads_at: int = 1, names: tuple[str, str] = ("q", "k")
) -> None:
    """Validates the numbers of heads, in dimension heads_at, and the head_dims of q and k."""
    (heads, kv_heads), (q_name, k_name) = (x.shape[heads_at] for x in (q, k)), names
    if heads < 1 or kv_heads < 1:
        raise ValueError(
            f"{q_name} has {heads} heads and {k_name} has {kv_heads}; both need at least one"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"{k_name} has head_dim {k.shape[-1]}; it must be that of {q_name}, {q.shape[-1]}"
        )
    if heads % kv_heads:
        raise ValueError(
            f"{k_name} has {kv_heads} heads; their number must divide that of {q_name}, {heads}"
            + (_ask_for_layout(q_name, q, kv_heads) if heads_at == 1 else "")
        )


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Validates ranks, dtypes, devices, shapes and strides of q, k and v."""
    check_each({"q": q, "k": k, "v": v})
    check_heads(q, k)
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}; its batch, heads and sequence must be those of k,"
            f" {tuple(k.shape[:3])}"
        )
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k has batch {k.shape[0]}; it must be that of q, {q.shape[0]}")


def check_mask(mask: Tensor, q: Tensor, k: Tensor, causal: bool) -> None:
    """Validates key_padding_mask, except for its values."""
    name, expected = "key_padding_mask", (k.shape[0], k.shape[2])
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} is a {type(mask).__name__}; it must be None or a torch.Tensor")
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} is {mask.dtype}; it must be torch.bool, True for tokens")
    if mask.shape != expected:
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)}; it must be (batch, keys), {expected}"
        )
    if mask.device != q.device:
        raise ValueError(f"{name} is on {mask.device} and q on {q.device}; they must share one")
    if not causal and q.shape[2] != k.shape[2]:
        raise ValueError(
            f"{name} is given with causal=False, {q.shape[2]} queries and {k.shape[2]} keys; these"
            " must be the same tokens: pack others, for biased_flash_attn_varlen"
        )


def check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) -> None:
    """Validates packed tensors and their offsets, before they are viewed as one batch entry."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        if x.dim() != 3:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (total, heads, head_dim)"
            )
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"v has shape {tuple(v.shape)}; its total and heads must be those of k,"
            f" {tuple(k.shape[:2])}"
        )
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_cu_seqlens(name, x, "q", q)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        raise ValueError(
            f"cu_seqlens_k has shape {tuple(cu_seqlens_k.shape)}; it must be that of cu_seqlens_q,"
            f" {tuple(cu_seqlens_q.shape)}"
        )
    for name, n in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if n is not None and (isinstance(n, bool) or not isinstance(n, (int, torch.SymInt))):
            raise TypeError(f"{name} is {n!r}; it must be None or an int")
        if n is not None and n < 0:
            raise ValueError(f"{name} is {n}; it must be None or an int from 0 on")


def check_cu_seqlens(name: str, offsets: Tensor, of: str, rows: Tensor) -> None:
    """Validates the offsets of `rows`, which errors call `of`, except for their values."""
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{name} is a {type(offsets).__name__}; it must be a torch.Tensor")
    if offsets.dtype != torch.int32:
        raise TypeError(f"{name} is {offsets.dtype}; it must be torch.int32")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} has shape {tuple(offsets.shape)}; it must be (sequences + 1,)")
    if offsets.device != rows.device:
        raise ValueError(
            f"{name} is on {offsets.device} and {of} on {rows.device}; they must share one"
        )


def check_options(causal, window, scale, tolerance, backend) -> None:
    """Validates the arguments that are neither tensors nor the bias."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}; it must be True or False")
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, (int, torch.SymInt)):
            raise TypeError(
                f"window is {window!r}; it must be None or a positive int" + _one_sided(window)
            )
        if window < 1:
            raise ValueError(f"window is {window}; it must be None or a positive int")
    check_scale("scale", scale)
    if tolerance is not None:
        _check_number("tolerance", tolerance, "None or a number in [0, 1)")
        if not 0 <= tolerance < 1:
            raise ValueError(f"tolerance is {tolerance}; it must be None or a number in [0, 1)")
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend is {backend!r}; it must be None or a name")


def as_int(value):
    """A numpy integer, or an integer tensor of one element, as an int; anything else unchanged."""
    is_bool = isinstance(value, Tensor) and value.dtype == torch.bool
    if value is None or is_bool or isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def check_scale(name: str, scale) -> None:
    """Validates the factor of q k^T; `name` is the name of the argument."""
    if scale is None:
        return
    _check_number(name, scale, "None or a finite number")
    if not abs(scale) <= sys.float_info.max:
        raise ValueError(f"{name} is {scale}; it must be None or a finite number")


def refuse_gradients(tensors: dict[str, Tensor]) -> None:
    """Raises ValueError if a tensor requires gradients while autograd records: decoding has
    no backward pass."""
    if not torch.is_grad_enabled():
        return
    for name, x in tensors.items():
        if x.requires_grad:
            raise ValueError(
                f"{name} requires gradients, but decoding has no backward pass; call it under"
                " torch.no_grad(), or pass all keys to biased_flash_attn(), whose o and lse have"
                " gradients"
            )


def refuse_meta(name: str, x: Tensor) -> None:
    """Raises ValueError for a meta tensor, where the result depends on values."""
    if torch.is_tensor(x) and x.is_meta:
        raise ValueError(f"{name} is on meta and has no values, on which the result depends")


def check_bias(bias, q: Tensor) -> None:
    """Validates that `bias` is a bias for q's heads and device."""
    if isinstance(bias, type):
        raise TypeError(f"bias is the class {bias.__name__}; it must be one of its instances")
    if isinstance(bias, str):  # which has a method lower() of its own
        raise TypeError(
            f"bias is {bias!r}; it must be None or one of biased_flash_attn.biases, not a name"
        )
    if isinstance(bias, Tensor) and bias.dim() == 1:
        raise TypeError(
            f"bias is a Tensor of shape {tuple(bias.shape)}; it must be None or one of"
            " biased_flash_attn.biases, for slopes ALiBi(slopes=bias)"
        )
    if isinstance(bias, Tensor):
        raise TypeError(
            "bias is a Tensor; it must be None or one of biased_flash_attn.biases, such as"
            " DenseBias(bias)"
        )
    if isinstance(bias, types.FunctionType):
        raise TypeError(
            "bias is a function; it must be None or one of biased_flash_attn.biases, for a function"
            " of the distance DistanceBias.from_function(bias, num_heads)"
        )
    if not hasattr(bias, "lower"):
        raise TypeError(
            f"bias is a {type(bias).__name__}; it must be None or one of biased_flash_attn.biases."
            " A module that computes its bias from hidden states is called first: bias=cable(x)"
        )
    num_heads = getattr(bias, "num_heads", q.shape[1])
    if num_heads != 1 and num_heads != q.shape[1]:
        raise ValueError(
            f"bias is for {num_heads} heads; it must be for 1 or for those of q, {q.shape[1]}"
            + _ask_for_layout("q", q, num_heads)
        )
    for parameter in bias.parameters() if isinstance(bias, nn.Module) else ():
        _check_device_of_bias(parameter, q)


def check_form(form, q: Tensor, geometry: Geometry) -> None:
    """Validates the dtypes and shapes of the tensors that a bias was lowered to."""
    if not isinstance(form, Form):
        raise TypeError(f"bias was lowered to a {type(form).__name__}; it must be to a form")
    # Packed sequences share one batch entry, but a bias of positions may have one entry for each.
    shares_entry = geometry.sequences is None or form.per_row
    batch = q.shape[0] if shares_entry else geometry.sequences.rows.shape[0]
    real = torch.promote_types(q.dtype, torch.float32)
    for x, dtype, rows in form.layouts(geometry, real):
        _check_device_of_bias(x, q)
        if x.dtype != dtype:
            raise TypeError(f"bias was lowered to {x.dtype}; it must be to {dtype}")
        if x.shape[2:] != rows or x.dim() < 2:
            expected = ", ".join(["B or 1", "H or 1", *map(str, rows)])
            raise ValueError(f"bias was lowered to shape {tuple(x.shape)}; it must be ({expected})")
        for what, size, own in (
            ("batch", x.shape[0], batch),
            ("head count", x.shape[1], q.shape[1]),
        ):
            if size != 1 and size != own:
                raise ValueError(f"bias has {what} {size}; it must be that of q, {own}, or 1")


def check_derivatives(*tensors: Tensor) -> None:
    """Raises NotImplementedError for forward-mode derivatives, which the kernels would ignore."""
    if forward_ad._current_level < 0:  # outside dual_level(), no tensor has a tangent
        return
    if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "the kernels have no forward-mode derivatives; use backend='reference', which has them"
        )


def _ask_for_layout(name: str, x: Tensor, num_heads: int) -> str:
    """The question that ends an error about heads, where x seems to have tokens before them."""
    if x.shape[2] != num_heads:
        return ""
    return f": do heads come before tokens in {name}, as in (batch, heads, tokens, channels)?"


def _one_sided(window) -> str:
    """The equivalent of flash-attn's window (left, 0), which does not count the query's own
    position."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        return ""
    left, right = window
    if not isinstance(left, int) or left < 0 or right != 0:
        return ""
    return f": flash-attn's {window!r} is window={left + 1}, which counts the query's own position"


def _check_device_of_bias(x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"bias is on {x.device} and q on {q.device}; they must share one")


def _check_number(name: str, value, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be {allowed}")
