"""Plans: which keys each query takes, where it is proved that those it leaves out are worth little.

A plan is an int32 tensor (2, B, H, tiles of queries). The queries from PLAN_QUERIES t to before
PLAN_QUERIES (t + 1) take, of the keys they see, plan[0, ..., t] to before plan[1, ..., t]. Neither
decreases with t. The exponentials of a query's logits of keys left out sum to `tolerance` times the
sum over those taken, or less.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..backends import registry
from ..geometry import Geometry
from ..limits import PLAN_QUERIES, TILE_KEYS
from ..problem import Problem
from .certificate import Certificate, Keys, reach, sides

# With fewer a plan takes longer than what it saves.
FEWEST_KEYS = 1024

_SAMPLED_QUERIES, _SAMPLED_KEYS = 64, 256
# How many samples are taken for the queries of a tile, which the most demanding one decides.
_SAMPLED_TILE = 15
# The attention of a query to so many keys takes as long as its part of the plan.
_COST_IN_KEYS = 256
# Exponentials that matter to a sum of this size do not underflow.
_LEAST_SUM = 2.0**-80
_ROUNDING = 2.0**-24  # of each addition


def query_tiles(n_query: int) -> int:
    return (n_query + PLAN_QUERIES - 1) // PLAN_QUERIES


def is_worthwhile(problem: Problem) -> bool:
    """Whether a plan may save more time than it takes to make."""
    few = problem.geometry.n_key < FEWEST_KEYS
    return problem.form.may_skip and problem.tolerance > 0 and not few


def everything(q: Tensor, geometry: Geometry) -> Tensor:
    """The plan that leaves out nothing."""
    plan = q.new_zeros((2, *q.shape[:2], query_tiles(geometry.n_query)), dtype=torch.int32)
    plan[1] = geometry.n_key
    return plan


def make(problem: Problem) -> Tensor:
    """A plan of each of the problem's sequences."""
    return _of_one(problem) if problem.sequences is None else _of_each(problem)


def _of_each(problem: Problem) -> Tensor:
    """That of several. Tiles beyond the queries of a sequence take no key."""
    rows, q = problem.sequences.rows, problem.q
    shape = (2, len(rows), q.shape[1], query_tiles(problem.geometry.n_query))
    plan = torch.empty(shape, dtype=torch.int32, device=q.device)
    tile = torch.arange(shape[3], device=q.device)
    exists = tile < query_tiles(rows[:, 1, None, None])
    plan[1] = rows[:, 3, None, None]
    plan[0] = torch.where(exists, 0, plan[1])
    for b, own in enumerate(problem.each_sequence()):
        geometry = own.geometry
        few = geometry.n_key < FEWEST_KEYS or geometry.n_query == 0
        if few or geometry.shift:  # beyond the keys, no nearest ones bound a query's lse
            continue
        made = _of_one(own)
        plan[:, b, :, : made.shape[3]] = made[:, 0]
    return plan


def _of_one(problem: Problem) -> Tensor:
    """A certified plan of the heads where it saves enough, and everything for the others."""
    plan = everything(problem.q, problem.geometry)
    log_tolerance = math.log(problem.tolerance)
    if plan.numel() == 0 or not problem.form.decays(problem.geometry, log_tolerance):
        return plan
    group = problem.q.shape[1] // problem.k.shape[1]
    worth = _promising(problem).unflatten(0, (-1, group)).any(1)
    if not worth.any():
        return plan
    if worth.all():
        return certified(problem)
    plan.unflatten(2, (-1, group))[:, :, worth] = certified(
        problem.of_kv_heads(worth.nonzero().squeeze(1))
    ).unflatten(2, (-1, group))
    return plan


def certified(problem: Problem) -> Tensor:
    """The plan that leaves out whatever is proved to be worth no more than the tolerance.

    Half of that is spent on what a bound says of keys that are not looked at, half on keys that
    turn out to be worth little.
    """
    certificates, near = Certificate.of(problem)
    fraction = fraction_of(problem.tolerance, certificates)
    plan = bounded(certificates, fraction, everything(problem.q, problem.geometry))
    if fraction < _LEAST_SUM:
        return plan
    backend, n_key = registry.get(problem.backend), problem.geometry.n_key
    fraction /= 1 + _ROUNDING * n_key
    near = near.to(problem.real)
    for certificate in certificates:
        from_end = certificate.mass.side.is_mirrored
        planned = replace(problem, plan=plan)
        trimmed = backend.trim(planned, near, fraction, reach(problem.geometry), from_end)
        tile = (trimmed + from_end * (TILE_KEYS - 1)) // TILE_KEYS
        plan[int(from_end)] = _in_order((tile * TILE_KEYS).clamp(max=n_key), from_end)
    return plan


def fraction_of(tolerance: float, certificates: list[Certificate]) -> float:
    """What one certificate, or trimming its side, may leave out."""
    return tolerance / (2 * len(certificates))


def bounded(certificates: list[Certificate], fraction: float, plan: Tensor) -> Tensor:
    """The plan without what each certificate bounds by fraction."""
    plan = plan.clone()
    for certificate in certificates:
        side = certificate.mass.side
        tile = certificate.last_cut(math.log(fraction))
        missing = plan.shape[-1] * PLAN_QUERIES - tile.shape[-1]
        tile = torch.nn.functional.pad(tile, (0, missing), value=side.tiles)
        cut = side.cut(tile.unflatten(-1, (-1, PLAN_QUERIES)).amin(-1))
        from_end = side.is_mirrored
        plan[int(from_end)] = _in_order(side.n_key - cut if from_end else cut, from_end)
    return plan


def _in_order(cut: Tensor, from_end: bool) -> Tensor:
    """Cuts that leave out no more than these, and never move back from one tile to the next."""
    return cut.cummax(-1).values if from_end else cut.flip(-1).cummin(-1).values.flip(-1)


def _promising(problem: Problem) -> Tensor:
    """Whether a head is expected to lose a worthwhile part of its keys, (H,) bool.

    A guess, from some of the queries and keys and as if these were Gaussian. It costs little beside
    the attention of a head that cannot lose any.
    """
    q, k, geometry = problem.q, problem.k, problem.geometry
    rows = slice(0, None, max(1, geometry.n_query // _SAMPLED_QUERIES))
    keys = Keys.of(k[:, :, :: max(1, geometry.n_key // _SAMPLED_KEYS)], q.shape[1])
    logit = abs(problem.scale) * keys.seen_by(q[:, :, rows])[0]
    variance = keys.distance.square().mean(-1, keepdim=True) / q.shape[3]
    lift = logit.square() * variance
    kept = seen = 0
    for side in sides(problem):
        mass = problem.form.mass(side, geometry)
        here = (side.positions[rows] + 1).clamp(0, side.n_key).expand(logit.shape)
        log_tile = logit.new_tensor(math.log(TILE_KEYS))
        near = mass.log_mass(rows, here // TILE_KEYS).logaddexp(log_tile)
        # Of Gaussian logits, exponentials are on average exp(lift / 2) times those of the bias.
        certain = lift.new_ones(*lift.shape[:2], side.tiles + 1)
        guess = Certificate(mass, rows, lift / 2, near + lift, certain, 1)
        cuts = guess.last_cut(math.log(problem.tolerance / 2))
        window = (here - side.cut(cuts)).double()
        of_tile = torch.nn.functional.max_pool1d(window, _SAMPLED_TILE, 1, _SAMPLED_TILE // 2)
        kept = kept + torch.minimum(of_tile, here).mean((0, 2))
        seen = seen + here.double().mean((0, 2))
    return seen - kept > _COST_IN_KEYS
