"""What the biases that depend on positions alone have in common."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..forms import Distance, Geometry
from .receptive_field import tail


class PositionBias(nn.Module):
    """A bias decided by positions alone: the same for every sequence of a batch.

    num_heads is a positive int, or ValueError or TypeError is raised.
    """

    # True promises that the bias has no parameters and that its settings never change, so that
    # what it was lowered to last time may be used again.
    fixed = False
    _last: tuple | None = None

    def __init__(self, num_heads: int):
        super().__init__()
        self.num_heads = positive_int("num_heads", num_heads)

    def lower(self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None):
        """The form of this bias over a geometry, in dtype (float32 or float64)."""
        raise NotImplementedError(f"{type(self).__name__} must define lower()")

    def dense(self, n_query: int, n_key: int) -> Tensor:
        """The bias of every pair, (num_heads, n_query, n_key) float64, unmasked.

        Query i stands at position i + n_key - n_query, so keys may lie on both sides of it.
        """
        for name, length in (("n_query", n_query), ("n_key", n_key)):
            if not isinstance(length, int) or length < 0:
                raise ValueError(f"{name} is {length!r}; it must be an int from 0 on")
        geometry = Geometry(n_query, n_key, causal=False)
        bias = self.lower(geometry, torch.float64, self.device).dense(geometry)
        return bias[0].expand(self.num_heads, -1, -1)

    def receptive_field(self, eps: float) -> Tensor:
        """The theoretical receptive field of each head, (num_heads,) float64 (Qin et al., 2023).

        It is the smallest count of nearest past keys that hold all but a share eps, in (0, 1), of
        the sum of exp(b(d)) over all d >= 0: how far attention looks where all products q.k are
        alike. It is infinite where that sum is.
        """
        with torch.no_grad():
            field = tail(self.curve, self.device).receptive_field(eps)
            return field.expand(self.num_heads)

    def curve(self, d: Tensor) -> Tensor:
        """The bias at distances d (n,) in float64, (num_heads or 1, n) float64."""
        raise NotImplementedError(f"{type(self).__name__} must define curve(d)")

    @property
    def device(self) -> torch.device | None:
        """Where its parameters are, if it has any."""
        return next((parameter.device for parameter in self.parameters()), None)

    def __getstate__(self) -> dict:
        return {name: value for name, value in self.__dict__.items() if name != "_last"}

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}"

    def _remembered(self, key: tuple, make: Callable[[], Tensor]) -> Tensor:
        """make(), or what it gave last time when the bias is fixed and the key is the same."""
        traced = torch.compiler.is_compiling() or type(torch.empty(0)) is not Tensor
        if not self.fixed or traced:
            return make()
        last = self._last
        if last is None or last[0] != key:
            # A tensor born in inference mode could not take part in a later backward pass.
            with torch.inference_mode(False):
                self._last = last = key, make()
        return last[1]


class DistanceBias(PositionBias):
    """A bias that is a function of the distance d = p_i - j: subclasses define `formula`.

    The formula is evaluated in float64 at each distance once, and rounded once. Its parameters
    are trained by autograd through it.
    """

    @staticmethod
    def from_function(
        function: Callable[[Tensor], Tensor], num_heads: int, *, signed: bool = False
    ) -> DistanceBias:
        """The bias that a function of the distance gives.

        The function takes distances (n,) in float64 and returns logits (num_heads, n), or (n,)
        for one curve shared by all heads. It is given |d|; with signed=True it is given d, which
        is negative for keys after the query. It may be a module, whose parameters are then
        parameters of the bias.
        """
        return FunctionBias(function, num_heads, signed)

    def formula(self, d: Tensor) -> Tensor:
        """Distances (n,) in float64 to logits (num_heads, n), or (n,) for all heads alike.

        d is negative for keys after the query, which only causal=False shows.
        """
        raise NotImplementedError(f"{type(self).__name__} must define formula(d)")

    def lower(
        self, geometry: Geometry, dtype: torch.dtype, device: torch.device | str | None
    ) -> Distance:
        """The table of the formula over the geometry's distances, (1, num_heads or 1, n)."""
        key = (geometry.first_distance, geometry.n_distances, dtype, device)
        table = self._remembered(key, lambda: self.logits(geometry.distances(device)).to(dtype))
        return Distance(table)

    def curve(self, d: Tensor) -> Tensor:
        return self.logits(d)[0].double()

    def logits(self, d: Tensor) -> Tensor:
        """What the formula gives for distances (n,) in float64, (1, num_heads or 1, n), checked."""
        logits = self.formula(d)
        shapes = (d.shape, (self.num_heads, *d.shape))
        real = isinstance(logits, Tensor) and not logits.is_complex()
        if not real or logits.shape not in shapes:
            got = type(logits).__name__
            if isinstance(logits, Tensor):
                got = f"{tuple(logits.shape)} {logits.dtype}"
            raise ValueError(
                f"the formula of {type(self).__name__} gave {got} for {d.shape[0]} distances; "
                f"it must give a real tensor of shape {tuple(shapes[0])} or {shapes[1]}"
            )
        return logits.reshape(1, -1, d.shape[0])


class FunctionBias(DistanceBias):
    """See `DistanceBias.from_function`."""

    def __init__(self, function: Callable[[Tensor], Tensor], num_heads: int, signed: bool):
        super().__init__(num_heads)
        if not callable(function):
            raise TypeError(f"function must be callable, not {type(function).__name__}")
        self.function = function
        self.signed = signed

    def formula(self, d: Tensor) -> Tensor:
        return self.function(d if self.signed else d.abs())


def positive(parameter: Tensor, most: float | None = None) -> Tensor:
    """The parameter in float64, held between 0.01 and most; gradients pass as if it were free.

    The authors of KERPLE clamp the stored values. That keeps gradients alive at the limit too,
    so that a head which was pushed there can come back.
    """
    free = parameter.double()
    return free + (free.clamp(0.01, most) - free).detach()


def positive_int(name: str, value: int) -> int:
    """value, or an error that names the argument."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value <= 0:
        raise ValueError(f"{name} must be positive, not {value}")
    return value
