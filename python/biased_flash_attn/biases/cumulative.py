"""Biases that sum steps between the query and the key, computed from the content."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..autocast import without_autocast
from ..forms import Cumulative, Geometry
from ..forms.cumulative import KERNELS
from ..summary import ShownByShapes
from .base import check_given
from .layers import called, dtype_of


@dataclass(frozen=True, eq=False, repr=False)
class CumulativeBias(ShownByShapes):
    """beta_ij = g_i * (sum of steps_t over j < t <= p_i), optionally with an outer function.

    For keys after the query the sum is over p_i < t <= j.

    Args:
        steps: (B or 1, H, n_key), floating point; the sums are computed in float64. Steps saturate
            at 2^20 and -2^20, so that -inf separates two documents. For packed sequences it is
            (1, H, total), and the sums restart from zero in each sequence.
        gain: g, (B or 1, H, n_query), or (B or 1, H, n_key) of which the last n_query are used.
            None means 1.
        kernel: None for b = beta, "log1p_square" for b = -log(1 + beta^2).

    Raises TypeError or ValueError for invalid arguments.
    """

    steps: Tensor
    gain: Tensor | None = None
    kernel: str | None = None

    def __post_init__(self):
        check_per_head("steps", self.steps)
        if self.gain is not None:
            check_per_head("gain", self.gain)
            batch, own = self.steps.shape[0], self.gain.shape[0]
            if self.gain.shape[1] != self.num_heads or not (batch == own or 1 in (batch, own)):
                raise ValueError(
                    f"gain has shape {tuple(self.gain.shape)}; its batch and heads must be those "
                    f"of steps, {tuple(self.steps.shape)}"
                )
        if self.kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {KERNELS}, not {self.kernel!r}")

    @property
    def num_heads(self) -> int:
        return self.steps.shape[1]

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Cumulative:
        """The cumulative sums in float64 and the gain in dtype, on their current device.

        Raises ValueError if steps or gain do not fit the geometry.
        """
        n_steps = self.steps.shape[-1]
        if n_steps != geometry.places:
            raise ValueError(
                f"steps has length {n_steps}; it must be the number of keys, {geometry.places}"
            )
        gain = None if self.gain is None else self._gain_of_queries(geometry).to(dtype)
        return Cumulative(geometry.prefix_sums(self.steps), gain, self.kernel)

    def for_heads(self, heads: slice) -> CumulativeBias:
        gain = None if self.gain is None else self.gain[:, heads]
        return CumulativeBias(self.steps[:, heads], gain, self.kernel)

    def with_places(self, places: int, end: int, n_query: int, n_key: int, padded: bool):
        """The bias of a call whose last query, of n_query, is at position end - 1, and may be
        before or after the last of n_key keys.

        It has a step for each of `places` positions, of which later ones than end - 1 are left out.
        padded: whether there may be padding before the first token, from which positions count.

        Raises ValueError if it has other steps.
        """
        if self.steps.shape[-1] != places:
            raise ValueError(
                f"bias: its steps have length {self.steps.shape[-1]}; it must be {places}, the"
                " number of positions"
            )
        steps, gain = self.steps[..., :end], self.gain
        if padded:
            steps = pad(steps, (0, min(n_key, end)))
        if gain is not None and gain.shape[-1] == places:
            gain = gain[..., end - n_query : end]
        return CumulativeBias(steps, gain, self.kernel)

    def dense(self, n_query: int, n_key: int) -> Tensor:
        """The bias of every pair, (B or 1, H, n_query, n_key) float64, unmasked."""
        geometry = Geometry(n_query, n_key, causal=False)
        return self.lower(geometry, torch.float64, self.steps.device).dense(geometry)

    def _gain_of_queries(self, geometry: Geometry) -> Tensor:
        n_gain, n_query, n_key = self.gain.shape[-1], geometry.query_rows, geometry.key_rows
        if n_gain == n_query:
            return self.gain
        if n_gain != n_key or n_query > n_key:
            raise ValueError(
                f"gain has length {n_gain}; it must be the number of queries, {n_query}, "
                f"or of keys, {n_key}, of which the last {n_query} are used"
            )
        return geometry.at_queries(self.gain)


def per_head(x: Tensor, dim: int, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Calls each layer on hidden states x (B, N, dim), with results (B, H, N).

    The computation is in float32 at least, also under autocast: an error in a step propagates to
    the bias of every later pair.
    """
    check_given("x", x)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a floating point tensor, not {described(x)}")
    if x.dim() != 3 or x.shape[-1] != dim:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be (B, N, {dim})")
    wide, outputs = torch.promote_types(x.dtype, torch.float32), []
    with without_autocast(x.device):
        for layer in layers:
            y = called(layer, x, torch.promote_types(wide, dtype_of(layer)))
            outputs.append(y.transpose(1, 2).contiguous())
    return tuple(outputs)


def check_per_head(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        raise TypeError(f"{name} must be a floating point tensor, not {described(value)}")
    if value.dim() != 3:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be (B or 1, H, N)")


def described(value: object) -> str:
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
