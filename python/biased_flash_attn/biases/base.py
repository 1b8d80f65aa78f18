"""The base class of all biases with settings or parameters."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Bias(nn.Module):
    """A bias as a module. Every bias is applied in the same way, whatever it is computed from:

        o = biased_flash_attn(bias.queries(q), k, v, bias(x, q, k), scale=bias.scale)

    x are the hidden states (B, N, dim) of the keys, from which q, k and v are projected; q
    (B, H, Nq, D) and k (B, Hkv, N, D) are the queries and keys. A bias reads only its `inputs`, so
    that the others may be left out: `cable(x)`, `shaw(q=q)`. A bias of positions has no inputs and
    may be passed uncalled, and most biases leave q and the scale as they are.

    Attributes:
        inputs: those of "x", "q" and "k" that the bias is computed from; "positions" if the call
            and `queries` also take those of the queries, (Nq,) or (B, Nq).
        scale: the factor of q k^T, None for 1 / sqrt(D).
    """

    inputs: ClassVar[tuple[str, ...]] = ()
    scale: float | None = None

    def forward(self, x: Tensor | None = None, q: Tensor | None = None, k: Tensor | None = None):
        """What `biased_flash_attn` takes as its bias, for these hidden states, queries and keys."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(x, q, k)")

    def queries(self, q: Tensor) -> Tensor:
        """The queries of the attention, given those of the layer."""
        return q

    @torch.no_grad()
    def plot(
        self,
        x: Tensor | None = None,
        q: Tensor | None = None,
        k: Tensor | None = None,
        *,
        length: int = 512,
    ) -> Figure:
        """Draws the bias and exp(b) against the distance, and exp(b) of all pairs: a picture in a
        notebook.

        x, q and k are as in a call, of the first of a batch; without inputs, `length` tokens. A
        bias that depends on the query is drawn for several queries of the first head. Needs
        matplotlib.
        """
        # Matplotlib is an optional dependency, which takes a second to import.
        pictures = importlib.import_module("..extrapolation.pictures", __package__)
        return pictures.of_bias(type(self).__name__, self, (x, q, k), length)


def check_given(name: str, value: Tensor | None) -> None:
    """Raises TypeError if an input of a bias is missing."""
    if value is None:
        raise TypeError(
            f"{name} is None; this bias is computed from it: bias(x, q, k) or bias({name}={name})"
        )
