"""CABLE, context-aware biases for length extrapolation (Veisi et al., 2025), and its variants.

Called on hidden states x (B, N, dim), each module returns the `CumulativeBias` of that sequence.

The paper prints b_ij = g_i (S_i - S_j), with S the prefix sum of relu(x w_c) >= 0 (eq. 2 to 7).
Its text, where ALiBi is the case in which every token's bias is -1, and its code treat the bias as
a penalty. So the steps have a minus sign here.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn.functional import relu, softplus

from .base import Bias
from .cumulative import CumulativeBias, per_head
from .layers import NormalLinear
from .parameters import finite, positive_int

ACTIVATIONS = {"relu": relu, "softplus": softplus}


class Cable(Bias):
    """b_ij = -g_i (S_i - S_j), S = cumsum(relu(x w_c)), g = softplus(x w_s).

    activation="softplus" replaces the relu, and weighted=False omits g. bias=True adds a bias to
    the linear layers. With init, their weights are normal with that standard deviation and their
    biases 0 at initialization; with None, they are initialized as nn.Linear does. The authors'
    released code is Cable(dim, num_heads, activation="softplus", weighted=False, bias=True,
    init=0.02).
    """

    inputs = ("x",)
    kernel: str | None = None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        activation: str = "relu",
        weighted: bool = True,
        bias: bool = False,
        init: float | None = None,
    ):
        super().__init__()
        self.num_heads = positive_int("num_heads", num_heads)
        if activation not in list(ACTIVATIONS):
            raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, not {activation!r}")
        self.activation = activation
        self.dim = positive_int("dim", dim)
        if init is not None and finite("init", init) < 0:
            raise ValueError(f"init is {init}; it must be None or a standard deviation")
        linear = nn.Linear if init is None else partial(NormalLinear, std=init)
        self.w_c = linear(dim, num_heads, bias=bias)
        self.w_s = linear(dim, num_heads, bias=bias) if weighted else None

    def forward(
        self, x: Tensor | None = None, q: Tensor | None = None, k: Tensor | None = None
    ) -> CumulativeBias:
        """The bias for hidden states x (B, N, dim) of the N keys."""
        layers = (self.w_c,) if self.w_s is None else (self.w_c, self.w_s)
        steps, *gains = per_head(x, self.dim, *layers)
        gain = softplus(gains[0]) if gains else None
        return CumulativeBias(-ACTIVATIONS[self.activation](steps), gain, self.kernel)


class CableNW(Cable):
    """b_ij = -(S_i - S_j): CABLE without weights."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        activation: str = "relu",
        bias: bool = False,
        init: float | None = None,
    ):
        options = {"activation": activation, "bias": bias, "init": init}
        super().__init__(dim, num_heads, weighted=False, **options)


class KernelizedCable(Cable):
    """b_ij = -log(1 + beta^2), beta = g_i (S_i - S_j) as in CABLE: a slower decay (section 5.4)."""

    kernel = "log1p_square"
