"""An upper bound on the softmax mass of the keys that are far from a query.

With c the mean of the keys, and r the largest |k_j - c| of some keys,

    sum_j exp(scale q_i . k_j + b_ij) <= exp(scale q_i . c + |scale| |q_i| r) sum_j exp(b_ij),

which is compared with the sum over the keys nearest to the query, as computed by a kernel. The
proof is in DESIGN.md, "Certified skipping".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..backends import registry
from ..forms import Form, Geometry, KeySide, TailMass
from ..problem import Problem
from ..shared_constants import NEAR_KEYS, ROUNDING, ROUNDING_FLOOR, TILE_KEYS, rounding_of_logits

_VALUES = 8  # the fewest channels that all backends compute
_CHUNK = 2**18  # elements of q or k that are converted at a time, few enough for the CPU cache


def sides(problem: Problem) -> list[KeySide]:
    """Returns the sides of a query that have visible keys."""
    geometry = problem.geometry
    past = KeySide(geometry.positions(problem.q.device), geometry.n_key)
    return [past] if geometry.causal else [past, past.mirrored()]


def reach(geometry: Geometry) -> int:
    """Returns the number of nearest past keys, which are never skipped."""
    return min(NEAR_KEYS, geometry.window or NEAR_KEYS, geometry.n_key)


@dataclass(frozen=True)
class Keys:
    """The mean of the keys of each query head, and their distances from it."""

    mean: Tensor  # (B, H, D)
    distance: Tensor  # of each key from the mean, (B, H, n_key) float64

    @staticmethod
    def of(k: Tensor, heads: int) -> Keys:
        mean = k.mean(2, dtype=torch.promote_types(k.dtype, torch.float32))
        # cdist via matrix products suffers from cancellation.
        direct = {"compute_mode": "donot_use_mm_for_euclid_dist"}
        distances = [torch.cdist(x, mean[:, :, None], **direct) for x in _chunks(k, mean.dtype)]
        per_kv_head = (mean, torch.cat(distances, 2).squeeze(-1).double())
        return Keys(*(x.repeat_interleave(heads // k.shape[1], 1) for x in per_kv_head))

    @property
    def largest_norm(self) -> Tensor:
        """An upper bound on the norms of the keys, (B, H, 1)."""
        from_mean = self.distance.amax(-1, keepdim=True)
        return from_mean + self.mean.double().norm(dim=-1, keepdim=True)

    def query_terms(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of each query and its product with the mean, (B, H, n_query) float64."""
        lengths, products = [], []
        for x in _chunks(q, self.mean.dtype):
            lengths.append(torch.linalg.vector_norm(x, dim=-1))
            products.append((x @ self.mean[..., None]).squeeze(-1))
        return torch.cat(lengths, 2).double(), torch.cat(products, 2).double()


@dataclass(frozen=True)
class Certificate:
    """The bound for one side, for the queries `rows` and cuts before each tile of keys.

    logit: |scale| |q_i|, (B, H, rows) float64. taken: a lower bound on the lse of the keys that the
    query attends to, minus scale q_i . c, (B, H, rows) float64. radius: the largest |k_j - c|
    before a cut, (B, H, tiles + 1).
    """

    mass: TailMass
    rows: slice
    logit: Tensor
    taken: Tensor
    radius: Tensor
    reach: int  # keys nearer than this are never skipped

    @staticmethod
    def of(problem: Problem) -> tuple[list[Certificate], Tensor]:
        """Returns one certificate per side, for all queries, and `near` (B, H, n_query) float64.

        near is a lower bound on the lse over the keys that are never skipped, and NaN for queries
        for which no key may be skipped.
        """
        q, k, form = problem.q, problem.k, problem.form
        keys = Keys.of(k, q.shape[1])
        length, product = keys.query_terms(q)
        logit = abs(problem.scale) * length
        near = _near_lse(problem)
        # Infinite and NaN values must propagate, so nothing is skipped if there are any.
        known = near.isfinite() & _finite(problem.v, q.shape[1])
        lost = rounding(q, logit * keys.largest_norm, near, form)
        near = torch.where(known, near - lost, torch.nan)
        taken = near - problem.scale * product

        def certificate(side: KeySide) -> Certificate:
            distance = keys.distance.flip(-1) if side.is_mirrored else keys.distance
            radius, mass = side.prefix_max(distance), form.mass(side, problem.geometry)
            nearest = 1 if side.is_mirrored else reach(problem.geometry)
            return Certificate(mass, slice(None), logit, taken, radius, nearest)

        return [certificate(side) for side in sides(problem)], near

    def log_bound(self, tile: Tensor) -> Tensor:
        """Returns the log of the bound on the mass that is skipped by cutting at `tile` (B, H,
        rows), relative to the mass of the remaining keys."""
        content = self.logit * self.radius.gather(-1, tile)
        return content + self.mass.log_mass(self.rows, tile) - self.taken

    def last_cut(self, log_tolerance: float) -> Tensor:
        """Returns, for each query, the last tile with log_bound <= log_tolerance, (B, H, rows)
        int64.

        This is a binary search, because the bound increases with the tile. A bound of NaN compares
        false, which leads to tile 0, where nothing is skipped.
        """
        side = self.mass.side
        last = (side.positions[self.rows] - self.reach + 1 + side.offset) // TILE_KEYS
        high = last.clamp(0, side.tiles).expand(self.taken.shape)
        low = torch.zeros_like(high)
        for _ in range(side.tiles.bit_length()):
            middle = (low + high + 1) >> 1
            within = (self.log_bound(middle) <= log_tolerance) & (low < high)
            low = torch.where(within, middle, low)
            high = torch.where(within, high, torch.maximum(middle - 1, low))
        return low


def _near_lse(problem: Problem) -> Tensor:
    """Returns the lse of each query over its nearest past keys, (B, H, n_query) float64.

    It is computed as attention with a window and few values, which do not matter.
    """
    whole, values = problem.geometry, problem.k[..., :_VALUES]
    geometry = Geometry(whole.n_query, whole.n_key, True, reach(whole))
    form = problem.form.within(whole, geometry)
    near = replace(problem, v=values, form=form, geometry=geometry, plan=None)
    return registry.get(problem.backend).forward(near)[1].double()


def rounding(q: Tensor, logit: Tensor, near: Tensor, form: Form) -> Tensor:
    """Returns a bound on the effect of rounding errors of kernels and of fast exponentials."""
    logit_rounding = rounding_of_logits(q.shape[3]) * (1 + logit + near.abs())
    return ROUNDING_FLOOR + logit_rounding + ROUNDING * form.roundings(q.dtype)


def _finite(v: Tensor, heads: int) -> Tensor:
    """Returns whether all values of each query head are finite, (B, H, 1)."""
    total = v.sum((2, 3), dtype=torch.promote_types(v.dtype, torch.float32))
    return total.isfinite().repeat_interleave(heads // v.shape[1], 1)[..., None]


def _chunks(x: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields x converted to dtype, in chunks along the sequence if the conversion needs a copy."""
    batch, heads, length, dim = x.shape
    fitting = max(TILE_KEYS, _CHUNK // max(1, batch * heads * dim))
    return (chunk.to(dtype) for chunk in x.split(length if x.dtype == dtype else fitting, 2))
