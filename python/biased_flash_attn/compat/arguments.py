"""Conversion of the arguments of flash-attn, and checks for unsupported ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..forms import Distance, Geometry, Linear
from ..validation import as_int


class Visibility(NamedTuple):
    """The arguments causal, window and shift of `Geometry`."""

    causal: bool
    window: int | None
    shift: int  # added to positions, so that a window into the future ends at the query


def visibility(causal, window_size, n_query: int, n_key: int) -> Visibility:
    """Converts flash-attn's mask, for at most n_query queries and n_key keys."""
    if not isinstance(causal, bool):
        raise TypeError(f"causal is {causal!r}; it must be True or False")
    left, right = _checked_window(window_size)
    if causal:
        right = 0
    # A side that reaches beyond all keys has no limit.
    if left >= n_key - 1:
        left = -1
    if right >= n_query - 1 and not causal:
        right = -1
    if right == -1:
        return Visibility(False, None if left == -1 else left + 1, 0)
    return Visibility(True, None if left == -1 else left + right + 1, right)


def _checked_window(window_size) -> tuple[int, int]:
    allowed = "it must be a pair of ints (left, right), -1 for no limit"
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise TypeError(f"window_size is {window_size!r}; {allowed}")
    sides = tuple(as_int(side) for side in window_size)
    for side in sides:
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"window_size is {window_size!r}; {allowed}")
        if side < -1:
            raise ValueError(f"window_size is {window_size!r}; {allowed}")
    return sides


class AlibiSlopes:
    """b_ij = -slope |p_i - j| with slopes (B or 1, H).

    shift: the number by which the positions of the geometry exceed p_i.
    """

    def __init__(self, slopes: Tensor, shift: int):
        self.slopes, self.shift = slopes, shift

    def lower(self, geometry: Geometry, dtype: torch.dtype, device: torch.device):
        """The slopes or, if positions are shifted, a table over their distances."""
        if self.shift == 0:
            return Linear(self.slopes.to(dtype))
        d = geometry.distances(device) - self.shift
        return Distance((-self.slopes.double()[..., None] * d.abs()).to(dtype))


def alibi(slopes, shift: int, q: Tensor, batch: int, heads: int) -> AlibiSlopes | None:
    """The bias for flash-attn's alibi_slopes."""
    if slopes is None:
        return None
    name = "alibi_slopes"
    if not isinstance(slopes, Tensor):
        raise TypeError(f"{name} is a {type(slopes).__name__}; it must be None or a torch.Tensor")
    if slopes.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} is {slopes.dtype}; it must be torch.float32")
    if slopes.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"{name} has shape {tuple(slopes.shape)}; it must be (heads,) or (batch, heads),"
            f" ({heads},) or ({batch}, {heads})"
        )
    if slopes.device != q.device:
        raise ValueError(f"{name} is on {slopes.device}; it must be on the device of q, {q.device}")
    return AlibiSlopes(slopes.reshape(-1, heads), shift)


def check_dropout(dropout_p) -> None:
    """Raises ValueError unless dropout_p is 0."""
    if dropout_p != 0:
        raise ValueError(f"dropout_p is {dropout_p!r}; it must be 0: dropout is not supported")


def check_softcap(softcap) -> None:
    """Raises ValueError unless softcap is 0."""
    if softcap != 0:
        raise ValueError(f"softcap is {softcap!r}; it must be 0: capped logits are not supported")


def contiguous_rows(x):
    """x with a contiguous last dimension, as the kernels require it, copied if necessary."""
    if not isinstance(x, Tensor) or x.dim() == 0 or x.stride(-1) == 1:
        return x
    return x.contiguous()
