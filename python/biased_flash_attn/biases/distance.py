"""Base classes of the biases that depend only on positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..forms import Distance, Form, Geometry
from ..tracing import is_transformed
from .base import Bias
from .parameters import check_function, positive_int, read_by
from .receptive_field import tail
from .tabulated import Tabulated


class PositionBias(Bias):
    """A bias that depends only on positions: the same for every sequence of a batch.

    num_heads is a positive int; otherwise ValueError or TypeError is raised.
    """

    # True promises that the bias has no parameters and that its settings never change, so that
    # its latest form may be reused.
    fixed = False
    # Whether it is a function of the distance alone, which `curve` evaluates.
    of_distance = True
    _latest: tuple | None = None

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = positive_int("num_heads", num_heads)

    def forward(
        self, x: Tensor | None = None, q: Tensor | None = None, k: Tensor | None = None
    ) -> PositionBias:
        """The bias itself."""
        return self

    def lower(self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None):
        """The form of this bias over a geometry, in dtype (float32 or float64)."""
        raise NotImplementedError(f"{type(self).__name__} must define lower()")

    def dense(self, n_query: int, n_key: int) -> Tensor:
        """The bias of every pair, (num_heads, n_query, n_key) float64, unmasked.

        Query i has position i + n_key - n_query, with keys before and possibly after it.
        """
        for name, length in (("n_query", n_query), ("n_key", n_key)):
            if not isinstance(length, int) or length < 0:
                raise ValueError(f"{name} is {length!r}; it must be a nonnegative int")
        geometry = Geometry(n_query, n_key, causal=False)
        bias = self.lower(geometry, torch.float64, self.device).dense(geometry)
        return bias[0].expand(self.num_heads, -1, -1)

    def receptive_field(self, eps: float) -> Tensor:
        """The theoretical receptive field of each head, (num_heads,) float64 (Qin et al., 2023).

        It is the smallest number of nearest past keys that hold all but a fraction eps, in (0, 1),
        of the sum of exp(b(d)) over all d >= 0: the range of attention if all products q.k are
        equal. It is infinite if the sum is infinite.
        """
        with torch.no_grad():
            field = tail(self.curve, self.device).receptive_field(eps)
            return field.expand(self.num_heads)

    def curve(self, d: Tensor) -> Tensor:
        """The bias at distances d (n,) in float64, (num_heads or 1, n) float64."""
        raise NotImplementedError(f"{type(self).__name__} must define curve(d)")

    def for_heads(self, heads: slice) -> PositionBias:
        """The bias of some of the heads: see `biases.of_heads`."""
        return PositionHeads(self, heads)

    @property
    def device(self) -> torch.device | None:
        """The device of the parameters, or None without parameters."""
        return next((parameter.device for parameter in self.parameters()), None)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_latest"}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"

    def _cached(self, key: tuple, make: Callable[[], Tensor]) -> Tensor:
        """make(), or its latest result if the bias is fixed and the key is the same."""
        traced = torch.compiler.is_compiling() or is_transformed()
        traced = traced or type(torch.empty(0)) is not Tensor
        if not self.fixed or traced:
            return make()
        latest = self._latest
        if latest is None or latest[0] != key:
            # A tensor created in inference mode cannot be used in a later backward pass.
            with torch.inference_mode(False):
                self._latest = latest = key, make()
        return latest[1]


class DistanceBias(Tabulated, PositionBias):
    """A bias that is a function of the distance d = p_i - j: subclasses define `formula`.

    The formula is evaluated once at each distance, in float64, and rounded once. Its parameters
    are trained by autograd through it.
    """

    @staticmethod
    def from_function(
        function: Callable[[Tensor], Tensor], num_heads: int, *, signed: bool = False
    ) -> DistanceBias:
        """A bias from a function of the distance.

        The function takes distances (n,) in float64 and returns logits (num_heads, n), or (n,)
        for one curve shared by all heads. Its argument is |d| or, with signed=True, d, which is
        negative for keys after the query. If it is a module, its parameters become parameters of
        the bias; a warning names those that a function captures. A bias of a lambda or of a
        local function cannot be pickled, as Python finds functions by their names; its state dict
        can.
        """
        return FunctionBias(function, num_heads, signed)

    def formula(self, d: Tensor) -> Tensor:
        """Maps distances (n,) in float64 to logits (num_heads, n), or (n,) if heads share them.

        d is negative for keys after the query, which are visible only with causal=False.
        """
        raise NotImplementedError(f"{type(self).__name__} must define formula(d)")

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Distance:
        """The table of the formula over the geometry's distances, (1, num_heads or 1, n)."""
        key = (geometry.first_distance, geometry.n_distances, dtype, device)
        table = self._cached(key, lambda: self.logits(geometry.distances(device)).to(dtype))
        return Distance(table)

    def for_heads(self, heads: slice) -> DistanceBias:
        return DistanceHeads(self, heads)

    def tables(self, d: Tensor) -> tuple[Tensor]:
        return (self.logits(d),)

    def curve(self, d: Tensor) -> Tensor:
        return self.logits(d)[0].double()

    def logits(self, d: Tensor) -> Tensor:
        """The checked formula at distances (n,) in float64: (1, num_heads or 1, n)."""
        logits = self._evaluated(d)
        shapes = (d.shape, (self.num_heads, *d.shape))
        real = isinstance(logits, Tensor) and not logits.is_complex()
        # Comparing shapes of different lengths would tell a compiler that n is not num_heads.
        if not real or logits.shape not in [x for x in shapes if len(x) == logits.dim()]:
            got = type(logits).__name__
            if isinstance(logits, Tensor):
                got = f"{tuple(logits.shape)} {logits.dtype}"
            raise ValueError(
                f"the formula of {type(self).__name__} returned {got} for {d.shape[0]} distances; "
                f"it must return a real tensor of shape {tuple(shapes[0])} or {shapes[1]}"
            )
        return logits.reshape(1, -1, d.shape[0])

    def _evaluated(self, d: Tensor) -> Tensor:
        """The formula at distances d; its errors name it and the distances."""
        if torch.compiler.is_compiling():  # the compiler has exceptions of its own
            return self.formula(d)
        try:
            return self.formula(d)
        except (NotImplementedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise RuntimeError(
                f"the formula of {type(self).__name__} failed for distances of shape"
                f" {tuple(d.shape)}, {d.dtype} on {d.device}: {type(error).__name__}: {error}"
            ) from error


class FunctionBias(DistanceBias):
    """See `DistanceBias.from_function`."""

    def __init__(self, function: Callable[[Tensor], Tensor], num_heads: int, signed: bool):
        super().__init__(num_heads)
        self.function = check_function(function)
        self.signed = signed

    def formula(self, d: Tensor) -> Tensor:
        return self.function(d if self.signed else d.abs())

    def table_sources(self) -> tuple:
        return self, *read_by(self.function)


class DistanceHeads(DistanceBias):
    """Some heads of a function of the distance."""

    def __init__(self, bias: DistanceBias, heads: slice):
        super().__init__(heads.stop - heads.start)
        self.whole, self.heads = bias, heads
        self.fixed = bias.fixed

    def table_sources(self) -> tuple:
        return self, *self.whole.table_sources()

    def formula(self, d: Tensor) -> Tensor:
        logits = Distance(self.whole.logits(d)).for_heads(self.heads).table[0]
        return logits.expand(self.num_heads, -1)


class PositionHeads(PositionBias):
    """Some heads of a bias of positions with any form."""

    def __init__(self, bias: PositionBias, heads: slice):
        super().__init__(heads.stop - heads.start)
        self.whole, self.heads = bias, heads
        self.fixed, self.of_distance = bias.fixed, bias.of_distance

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Form:
        return self.whole.lower(geometry, dtype, device).for_heads(self.heads)

    def curve(self, d: Tensor) -> Tensor:
        return self.whole.curve(d)[self.heads]

    def receptive_field(self, eps: float) -> Tensor:
        return self.whole.receptive_field(eps)[self.heads]
