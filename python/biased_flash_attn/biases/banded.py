"""Inkling's bias: profiles of the distance that each query mixes, within a band."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .base import Bias
from .layers import NormalLinear
from .parameters import finite, positive_int
from .relative import RelativeBias, rank_of, states_of_queries


class BandedRelative(Bias):
    """b_ij = tau_i sum_r (W_r x_i)[h, r] P[r, d] for distances 0 <= d < extent, otherwise 0.

    It is the bias of Inkling (Thinking Machines Lab, 2026). The `rank` profiles P are functions of
    the distance that all heads of a layer share; each query mixes them. Layers may have different
    extents: Inkling's local layers have that of their window. Keys after the query have no bias.

    Called on hidden states x (B, N, dim), it returns the `RelativeBias` of these tokens.

    With log_floor, the logits of late queries are scaled by tau_i = 1 + log_alpha log(max(1,
    (p_i + 1) / log_floor)), where p_i counts from the first token: pass `queries(q)` to the
    attention. With max_norm, as in Inkling 2, the vector W_r x_i of a head is multiplied by trained
    factors, and shortened to that length if it is longer.

    Parameters: `r_proj.weight` (num_heads * rank, dim) and `proj` (rank, extent), as they are named
    in transformers, and with max_norm the factors `clip_scale` (num_heads, rank). Their initial
    values are those of transformers: normal with standard deviation 0.02, and ones.

    Args:
        dim: channels of x.
        num_heads: heads of q.
        extent: the number of distances with a bias.
        rank: the number of profiles, at most 128.
        log_floor: the position from which logits are scaled, or None for no scaling.
        log_alpha: the strength of the scaling.
        max_norm: the largest length of the vector by which a head mixes the profiles, or None.

    Raises TypeError or ValueError for invalid arguments.
    """

    inputs = ("x", "positions")

    def __init__(
        self,
        dim: int,
        num_heads: int,
        extent: int = 1024,
        rank: int = 16,
        *,
        log_floor: float | None = None,
        log_alpha: float = 0.1,
        max_norm: float | None = None,
    ):
        super().__init__()
        self.num_heads = positive_int("num_heads", num_heads)
        self.rank, self.extent = rank_of("rank", rank), positive_int("extent", extent)
        for name, value in (("log_floor", log_floor), ("max_norm", max_norm)):
            if value is not None and finite(name, value) <= 0:
                raise ValueError(f"{name} must be None or positive, not {value}")
        self.log_floor, self.log_alpha = log_floor, finite("log_alpha", log_alpha)
        self.max_norm = max_norm
        self.dim = positive_int("dim", dim)
        self.proj = nn.Parameter(torch.empty(rank, extent))
        self.clip_scale = None
        if max_norm is not None:
            self.clip_scale = nn.Parameter(torch.empty(num_heads, rank))
        self.reset_parameters()
        self.r_proj = NormalLinear(dim, num_heads * rank, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.proj, std=0.02)
        if self.clip_scale is not None:
            nn.init.ones_(self.clip_scale)

    def forward(
        self,
        x: Tensor | None = None,
        q: Tensor | None = None,
        k: Tensor | None = None,
        *,
        positions: Tensor | None = None,
    ) -> RelativeBias:
        """The bias for the queries of hidden states x (B, N, dim): those of the last Nq if q is
        given.

        positions: p_i, (Nq,) or (B, Nq), for the scaling with log_floor; by default those of the
        last Nq of N tokens. In decoding, they continue those of the cached tokens.
        """
        states = states_of_queries(x, q, self.dim)
        if positions is None:
            n_key = x.shape[1]
            positions = torch.arange(n_key - states.shape[1], n_key, device=x.device)
        factors = self.r_proj(states).unflatten(-1, (self.num_heads, self.rank)).transpose(1, 2)
        if self.clip_scale is not None:
            factors = self._clipped(factors)
        return RelativeBias(self.queries(factors, positions), self.proj[None])

    def queries(self, q: Tensor, positions: Tensor | None = None) -> Tensor:
        """q (B, H, N, D) times tau_i, for the attention: q itself without log_floor.

        positions: p_i, (N,) or (B, N); 0 to N - 1 by default.
        """
        if self.log_floor is None:
            return q
        if positions is None:
            positions = torch.arange(q.shape[2], device=q.device)
        if positions.shape[-1:] != q.shape[2:3] or positions.dim() > 2:
            raise ValueError(
                f"positions has shape {tuple(positions.shape)}; it must be (N,) or (B, N) with"
                f" N = {q.shape[2]}"
            )
        real = torch.promote_types(q.dtype, torch.float32)
        tau = log_scaling(positions, self.log_floor, self.log_alpha, real)
        return (q * tau[..., None, :, None]).to(q.dtype)

    def _clipped(self, factors: Tensor) -> Tensor:
        real = torch.promote_types(factors.dtype, torch.float32)
        scaled = factors.to(real) * self.clip_scale.to(real)[:, None]
        norm = scaled.norm(dim=-1, keepdim=True)
        return (scaled * (self.max_norm / (norm + 1e-6)).clamp(max=1)).to(factors.dtype)


def log_scaling(positions: Tensor, floor: float, alpha: float, dtype: torch.dtype) -> Tensor:
    """1 + alpha log(max(1, (p + 1) / floor)) for every position p, in the shape of positions."""
    ratio = (positions + 1).to(dtype) / floor
    return 1 + alpha * torch.log(ratio.clamp(min=1))
