"""Plans: the key range of each query, outside of which keys provably carry negligible softmax mass.

A plan is an int32 tensor (2, B, H, tiles of queries). Queries PLAN_QUERIES t to PLAN_QUERIES (t +
1) - 1 attend to the visible keys in [plan[0, ..., t], plan[1, ..., t]). Neither bound decreases
with t. For every query, the exponentials of the logits of skipped keys sum to at most `tolerance`
times the sum over the other keys.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..backends import registry
from ..geometry import Geometry
from ..problem import Problem
from ..shared_constants import PLAN_QUERIES, TILE_KEYS
from .certificate import Certificate, Keys, reach, sides

# With fewer keys, computing a plan takes longer than it saves.
MIN_KEYS = 1024

_SAMPLED_QUERIES, _SAMPLED_KEYS = 64, 256
# Samples that stand for the queries of a tile, whose cut is the smallest cut of any query.
_SAMPLED_TILE = 15
# Computing the plan takes as long, per query, as attention to this many keys.
_COST_IN_KEYS = 256
# The smallest sum whose significant terms do not underflow.
_MIN_SUM = 2.0**-80
_ROUNDING = 2.0**-24  # relative rounding error of an addition


def query_tiles(n_query: int) -> int:
    return (n_query + PLAN_QUERIES - 1) // PLAN_QUERIES


def is_worthwhile(problem: Problem) -> bool:
    """Returns whether a plan may save more time than computing it takes.

    Compiled code may be called with any number of keys, and leaves that decision to the plan.
    """
    if not problem.form.may_skip or problem.tolerance == 0:
        return False
    return torch.compiler.is_compiling() or problem.geometry.n_key >= MIN_KEYS


def full_plan(q: Tensor, geometry: Geometry) -> Tensor:
    """Returns the plan that skips no key."""
    plan = q.new_zeros((2, *q.shape[:2], query_tiles(geometry.n_query)), dtype=torch.int32)
    plan[1] = geometry.n_key
    return plan


def make(problem: Problem) -> Tensor:
    """Returns a certified plan of the problem, with one batch entry per sequence."""
    return _of_sequence(problem) if problem.sequences is None else _per_sequence(problem)


def _per_sequence(problem: Problem) -> Tensor:
    """Returns the plan of several sequences. Tiles beyond the queries of a sequence have empty
    ranges."""
    rows, q = problem.sequences.rows, problem.q
    shape = (2, len(rows), q.shape[1], query_tiles(problem.geometry.n_query))
    plan = torch.empty(shape, dtype=torch.int32, device=q.device)
    tile = torch.arange(shape[3], device=q.device)
    exists = tile < query_tiles(rows[:, 1, None, None])
    plan[1] = rows[:, 3, None, None]
    plan[0] = torch.where(exists, 0, plan[1])
    for b, own in enumerate(problem.each_sequence()):
        geometry = own.geometry
        few = geometry.n_key < MIN_KEYS or geometry.n_query == 0
        if few or geometry.shift:  # queries beyond the keys have no near keys to bound their lse
            continue
        made = _of_sequence(own)
        plan[:, b, :, : made.shape[3]] = made[:, 0]
    return plan


def _of_sequence(problem: Problem) -> Tensor:
    """Returns the plan of one sequence: certified for heads where it saves enough time, and the
    full plan for the others."""
    plan = full_plan(problem.q, problem.geometry)
    log_tolerance, few = math.log(problem.tolerance), problem.geometry.n_key < MIN_KEYS
    if few or plan.numel() == 0 or not problem.form.decays(problem.geometry, log_tolerance):
        return plan
    group = problem.q.shape[1] // problem.k.shape[1]
    worth = _is_promising(problem).unflatten(0, (-1, group)).any(1)
    if not worth.any():
        return plan
    if worth.all():
        return certified(problem)
    plan.unflatten(2, (-1, group))[:, :, worth] = certified(
        problem.for_kv_heads(worth.nonzero().squeeze(1))
    ).unflatten(2, (-1, group))
    return plan


def certified(problem: Problem) -> Tensor:
    """Returns the plan that skips all keys whose mass is proved to be within the tolerance.

    One half of the tolerance is used for keys that are skipped by the bound alone, the other half
    for keys that `trim` removes after computing their logits.
    """
    certificates, near = Certificate.of(problem)
    fraction = fraction_of(problem.tolerance, certificates)
    plan = bounded(certificates, fraction, full_plan(problem.q, problem.geometry))
    if fraction < _MIN_SUM:
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
    """Returns the fraction of the mass that one certificate, or trimming its side, may skip."""
    return tolerance / (2 * len(certificates))


def bounded(certificates: list[Certificate], fraction: float, plan: Tensor) -> Tensor:
    """Returns the plan without the keys whose mass each certificate bounds by `fraction`."""
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
    """Returns the largest monotonic cuts that skip no more keys than the given ones."""
    return cut.cummax(-1).values if from_end else cut.flip(-1).cummin(-1).values.flip(-1)


def _is_promising(problem: Problem) -> Tensor:
    """Returns whether a plan is expected to skip enough keys of a head to save time, (H,) bool.

    This is a heuristic, from samples of the queries and keys, under the assumption that their
    products are Gaussian. Its cost is small compared to the attention of a head that cannot skip
    any keys.
    """
    q, k, geometry = problem.q, problem.k, problem.geometry
    rows = slice(0, None, max(1, geometry.n_query // _SAMPLED_QUERIES))
    keys = Keys.of(k[:, :, :: max(1, geometry.n_key // _SAMPLED_KEYS)], q.shape[1])
    logit = abs(problem.scale) * keys.query_terms(q[:, :, rows])[0]
    variance = keys.distance.square().mean(-1, keepdim=True) / q.shape[3]
    lift = logit.square() * variance
    kept = seen = 0
    for side in sides(problem):
        mass = problem.form.mass(side, geometry)
        here = (side.positions[rows] + 1).clamp(0, side.n_key).expand(logit.shape)
        log_tile = logit.new_tensor(math.log(TILE_KEYS))
        near = mass.log_mass(rows, here // TILE_KEYS).logaddexp(log_tile)
        # With Gaussian logits, the mean of the exponentials is exp(lift / 2) times that of the
        # bias.
        certain = lift.new_ones(*lift.shape[:2], side.tiles + 1)
        guess = Certificate(mass, rows, lift / 2, near + lift, certain, 1)
        cuts = guess.last_cut(math.log(problem.tolerance / 2))
        window = (here - side.cut(cuts)).double()
        per_tile = torch.nn.functional.max_pool1d(window, _SAMPLED_TILE, 1, _SAMPLED_TILE // 2)
        kept = kept + torch.minimum(per_tile, here).mean((0, 2))
        seen = seen + here.double().mean((0, 2))
    return seen - kept > _COST_IN_KEYS
