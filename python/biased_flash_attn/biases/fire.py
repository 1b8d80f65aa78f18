"""FIRE, functional interpolation for relative position encoding (Li et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..forms import Geometry, Normalized
from .distance import PositionBias
from .layers import check_linear
from .parameters import check_function, finite, positive_int, read_by
from .tabulated import Tabulated

_LARGEST_SAMPLES = 1024  # segments of a sampled function


class Pieces(NamedTuple):
    """f_h(x) = intercepts[h, s] + slopes[h, s] x for knots[s - 1] <= x < knots[s], in float64.

    knots (K,) in ascending order; slopes and intercepts (num_heads or 1, K + 1).
    """

    knots: Tensor
    slopes: Tensor
    intercepts: Tensor


class NormalizedBias(Tabulated, PositionBias):
    """b_ij = f(psi(|d|) / psi(max(L, p_i))), psi(x) = log(1 + |c| x), for a subclass's function f.

    A query's longest distance, p_i, is mapped to 1 at any length, so f interpolates where other
    biases extrapolate. Distances of queries before position L are normalized by psi(L).

    c and L = |L_multiplier * init_L| are trained. All of f's arguments are in [0, 1] if attention
    is causal.
    """

    of_distance = False

    def __init__(self, num_heads: int, init_c: float = 0.1, init_length: float = 512.0):
        super().__init__(num_heads)
        for name, value in (("init_c", init_c), ("init_length", init_length)):
            if finite(name, value) <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        self.init_c, self.init_length = float(init_c), float(init_length)
        self.c = nn.Parameter(torch.empty(()))
        # The paper trains a factor of L, whose learning rate then suits that of other parameters.
        self.L_multiplier = nn.Parameter(torch.empty(()))
        self.register_buffer("init_L", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.c, self.init_c)
        nn.init.ones_(self.L_multiplier)
        nn.init.constant_(self.init_L, self.init_length)

    @staticmethod
    def from_function(
        function: Callable[[Tensor], Tensor],
        num_heads: int,
        *,
        error: float = 1e-3,
        init_c: float = 0.1,
        init_length: float = 512.0,
    ) -> NormalizedBias:
        """A bias with a function of the normalized distance.

        The function takes x (n,) in float64 and returns logits (num_heads, n), or (n,) for one
        curve shared by all heads. It is replaced by its linear interpolation between equidistant
        samples, so many that halfway between them it deviates by at most `error`. Parameters and
        pickling are as in `DistanceBias.from_function`.
        """
        return SampledBias(function, num_heads, error, init_c, init_length)

    def pieces(self, geometry: Geometry) -> Pieces:
        """The function f for the arguments that the geometry has, which `largest` bounds."""
        raise NotImplementedError(f"{type(self).__name__} must define pieces()")

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Normalized:
        knots, *per_head = self.pieces(geometry)
        pieces = knots.detach()[None, None], *(x[None] for x in per_head)
        tensors = *self.tables(geometry.distances(device)), self._gain(geometry, device), *pieces
        return Normalized(*(x.to(dtype) for x in tensors))

    def tables(self, d: Tensor) -> tuple[Tensor]:
        return (self.psi(d.abs())[None, None],)

    def over(self, form: Normalized, geometry: Geometry, dtype: torch.dtype) -> Normalized:
        return replace(form, gain=self._gain(geometry, form.table.device).to(dtype))

    def psi(self, x: Tensor) -> Tensor:
        return torch.log1p(self.c.double().abs() * x)

    def receptive_field(self, eps: float) -> Tensor:
        """Infinite for every head: f is bounded on [0, 1], so the sum of its exponentials over the
        keys of a query grows with the query's position."""
        if not 0 < eps < 1:
            raise ValueError(f"eps must be in (0, 1), not {eps}")
        return torch.full((self.num_heads,), torch.inf, dtype=torch.float64, device=self.device)

    @property
    def _length(self) -> Tensor:
        """L, float64."""
        return (self.L_multiplier * self.init_L).double().abs()

    def _gain(self, geometry: Geometry, device: torch.device | str | None) -> Tensor:
        """1 / psi(max(L, p_i)) of every query, (B or 1, 1, query_rows) float64."""
        position = geometry.row_positions(device).clamp(min=0).double()
        # The paper adds 1e-6 to the normalizer.
        normalizer = self.psi(torch.maximum(position, self._length)) + 1e-6
        return normalizer.reciprocal()[:, None]

    def largest(self, geometry: Geometry) -> float:
        """The largest argument of f: keys after a query may be farther from it than the first
        one, and the first key may be after the first query."""
        if geometry.causal:
            return 1.0
        with torch.no_grad():
            length = self._length
            farthest = max(geometry.n_key + geometry.shift, geometry.n_query)
            reach = torch.tensor(float(farthest), device=length.device)
            return float((self.psi(reach) / self.psi(length)).clamp(min=1))


class FIRE(NormalizedBias):
    """FIRE: f is an MLP with one hidden layer of `width` rectified linear units.

    f is therefore piecewise linear with at most `width` knots. The initial values and the names of
    the parameters are those of the authors' code.
    """

    def __init__(
        self, num_heads: int, width: int = 32, init_c: float = 0.1, init_length: float = 512.0
    ):
        super().__init__(num_heads, init_c, init_length)
        hidden = nn.Linear(1, positive_int("width", width))
        self.mlp = nn.Sequential(hidden, nn.ReLU(), nn.Linear(width, self.num_heads))

    def pieces(self, geometry: Geometry) -> Pieces:
        hidden, out = self._linears()
        slope, offset = hidden.weight[:, 0].double(), hidden.bias.double()
        with torch.no_grad():
            # A unit with slope 0 is constant and has no knot.
            knots = torch.where(slope == 0, torch.inf, -offset / slope)
            knots, order = knots.sort()
        slope, offset, weight = slope[order], offset[order], out.weight.double()[:, order]
        unit = torch.arange(len(order), device=slope.device)
        segment = torch.arange(len(order) + 1, device=slope.device)[:, None]
        rising, falling = segment > unit, segment <= unit
        active = torch.where(
            slope > 0, rising, torch.where(slope < 0, falling, (offset > 0).expand_as(falling))
        )
        intercepts = weight @ (active * offset).mT + out.bias.double()[:, None]
        return Pieces(knots, weight @ (active * slope).mT, intercepts)

    def _linears(self) -> tuple[nn.Linear, nn.Linear]:
        """The linear layers of the MLP, whose weights determine its pieces."""
        layers = list(self.mlp) if isinstance(self.mlp, nn.Sequential) else []
        if len(layers) != 3 or not isinstance(layers[1], nn.ReLU):
            raise TypeError(
                f"mlp of FIRE is {self.mlp}; it must be a torch.nn.Sequential of a Linear, a ReLU"
                " and a Linear layer, as its weights are read and it is never called"
            )
        for n in (0, 2):
            check_linear(f"mlp[{n}] of FIRE", layers[n])
        return layers[0], layers[2]


class SampledBias(NormalizedBias):
    """See `NormalizedBias.from_function`."""

    def __init__(self, function, num_heads: int, error: float, init_c: float, init_length: float):
        super().__init__(num_heads, init_c, init_length)
        if finite("error", error) <= 0:
            raise ValueError(f"error must be positive, not {error}")
        self.function, self.error = check_function(function), error

    def table_sources(self) -> tuple:
        return *super().table_sources(), *read_by(self.function)

    def pieces(self, geometry: Geometry) -> Pieces:
        largest = self.largest(geometry)
        segments, deviation = 1, torch.inf
        while deviation > self.error:
            segments *= 2
            if segments > _LARGEST_SAMPLES:
                raise ValueError(
                    f"function deviates by {deviation:.2g} from its interpolation between"
                    f" {_LARGEST_SAMPLES} samples; error must be at least that, not {self.error}"
                )
            with torch.no_grad():
                values = self._values(largest, 2 * segments)
                middle = (values[:, :-1:2] + values[:, 2::2]) / 2
                deviation = float((values[:, 1::2] - middle).abs().amax())
        x, values = self._arguments(largest, segments), self._values(largest, segments)
        slopes = values.diff() * (segments / largest)
        return Pieces(x[1:-1], slopes, values[:, :-1] - slopes * x[:-1])

    def _arguments(self, largest: float, segments: int) -> Tensor:
        return torch.linspace(0, largest, segments + 1, dtype=torch.float64, device=self.c.device)

    def _values(self, largest: float, segments: int) -> Tensor:
        """f at the ends of equal segments, (num_heads or 1, segments + 1)."""
        x = self._arguments(largest, segments)
        values = self.function(x)
        shapes = (x.shape, (self.num_heads, *x.shape))
        if not isinstance(values, Tensor) or values.shape not in shapes:
            got = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"function returned {got} for {x.shape[0]} arguments; it must return a tensor of"
                f" shape {tuple(shapes[0])} or {tuple(shapes[1])}"
            )
        return values.double().reshape(-1, x.shape[0])
