"""Plans: which keys each query takes, where it is proved that those it leaves out are worth little.

A plan is an int32 tensor (2, B, H, tiles of queries). The queries from QUERY_TILE t to before
QUERY_TILE (t + 1) take, of the keys they see, plan[0, ..., t] to before plan[1, ..., t]. Neither
decreases with t. The exponentials of a query's logits of keys left out sum to `tolerance` times the
sum over those taken, or less.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import backends
from .certificate import Bias, Certificate, Keys
from .forms import Geometry
from .parts import parts
from .tail_mass import KEY_STEP

QUERY_TILE = 128
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
    return (n_query + QUERY_TILE - 1) // QUERY_TILE


def everything(q: Tensor, geometry: Geometry) -> Tensor:
    """The plan that leaves out nothing."""
    shape = (2, *q.shape[:2], query_tiles(geometry.n_query))
    plan = torch.zeros(shape, dtype=torch.int32, device=q.device)
    plan[1] = geometry.n_key
    return plan


def make_of_sequences(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, tolerance: float, backend: str
) -> Tensor:
    """A plan of each of the geometry's sequences. Tiles beyond its queries take no key."""
    rows = bias.geometry.sequences.rows
    shape = (2, len(rows), q.shape[1], query_tiles(bias.geometry.n_query))
    plan = torch.empty(shape, dtype=torch.int32, device=q.device)
    tile = torch.arange(shape[3], device=q.device)
    exists = tile < query_tiles(rows[:, 1, None, None])
    plan[1] = rows[:, 3, None, None]
    plan[0] = torch.where(exists, 0, plan[1])
    each = parts(bias.geometry, q, k, v, bias.terms, bias.gain, bias.form)
    for b, part in enumerate(each):
        few = part.geometry.n_key < FEWEST_KEYS or part.geometry.n_query == 0
        if few or part.geometry.shift:  # beyond the keys, no nearest ones bound a query's lse
            continue
        own = Bias(part.terms, part.gain, bias.form, bias.scale, part.geometry)
        made = make(part.q, part.k, part.v, own, tolerance, backend)
        plan[:, b, :, : made.shape[3]] = made[:, 0]
    return plan


def make(q: Tensor, k: Tensor, v: Tensor, bias: Bias, tolerance: float, backend: str) -> Tensor:
    """A certified plan of the heads where it saves enough, and everything for the others."""
    plan = everything(q, bias.geometry)
    if plan.numel() == 0 or not _decays(bias, tolerance):
        return plan
    group = q.shape[1] // k.shape[1]
    worth = _promising(q, k, bias, tolerance).unflatten(0, (-1, group)).any(1)
    if not worth.any():
        return plan
    if worth.all():
        return certified(q, k, v, bias, tolerance, backend)
    kv_heads = worth.nonzero().squeeze(1)
    heads = (kv_heads[:, None] * group + torch.arange(group, device=q.device)).flatten()
    k, v = k[:, kv_heads], v[:, kv_heads]
    plan[:, :, heads] = certified(q[:, heads], k, v, bias.of_heads(heads), tolerance, backend)
    return plan


def certified(
    q: Tensor, k: Tensor, v: Tensor, bias: Bias, tolerance: float, backend: str
) -> Tensor:
    """The plan that leaves out whatever is proved to be worth no more than tolerance.

    Half of that is spent on what a bound says of keys that are not looked at, half on keys that
    turn out to be worth little.
    """
    certificates, near = Certificate.of(q, k, v, bias, backend)
    share = share_of(tolerance, certificates)
    plan = bounded(certificates, share, everything(q, bias.geometry))
    if share < _LEAST_SUM:
        return plan
    trim = backends.kernels(backend).trim
    share /= 1 + _ROUNDING * bias.geometry.n_key
    near = near.to(torch.promote_types(q.dtype, torch.float32))
    options = (bias.terms, bias.gain, bias.form, bias.scale, bias.geometry.causal)
    for certificate in certificates:
        from_end = certificate.mass.side.is_mirrored
        call = (q, k, *options, bias.geometry.window, plan, near, share, bias.reach, from_end)
        tile = (trim(*call) + from_end * (KEY_STEP - 1)) // KEY_STEP
        cut = (tile * KEY_STEP).clamp(max=bias.geometry.n_key)
        plan[int(from_end)] = _in_order(cut, from_end)
    return plan


def share_of(tolerance: float, certificates: list[Certificate]) -> float:
    """What one certificate, or trimming its side, may leave out."""
    return tolerance / (2 * len(certificates))


def bounded(certificates: list[Certificate], share: float, plan: Tensor) -> Tensor:
    """The plan without what each certificate bounds by share."""
    plan = plan.clone()
    for certificate in certificates:
        side = certificate.mass.side
        tile = certificate.last_cut(math.log(share))
        missing = plan.shape[-1] * QUERY_TILE - tile.shape[-1]
        tile = torch.nn.functional.pad(tile, (0, missing), value=side.tiles)
        cut = side.cut(tile.unflatten(-1, (-1, QUERY_TILE)).amin(-1))
        from_end = side.is_mirrored
        plan[int(from_end)] = _in_order(side.n_key - cut if from_end else cut, from_end)
    return plan


def _in_order(cut: Tensor, from_end: bool) -> Tensor:
    """Cuts that leave out no more than these, and never move back from one tile to the next."""
    return cut.cummax(-1).values if from_end else cut.flip(-1).cummin(-1).values.flip(-1)


def _decays(bias: Bias, tolerance: float) -> bool:
    """Whether some head of a table is worth less than tolerance at the farthest quarter of it.

    Were all keys alike, no other could lose more than a sixteenth of its pairs.
    """
    if bias.form != "distance":
        return True
    past = bias.terms[..., -bias.geometry.first_distance :]
    far = past[..., 3 * past.shape[-1] // 4 :].logsumexp(-1) - past.logsumexp(-1)
    return bool((far < math.log(tolerance)).any())


def _promising(q: Tensor, k: Tensor, bias: Bias, tolerance: float) -> Tensor:
    """Whether a head is expected to lose a worthwhile share of its keys, (H,) bool.

    A guess, from some of the queries and keys and as if these were Gaussian. It costs little beside
    the attention of a head that cannot lose any.
    """
    geometry = bias.geometry
    rows = slice(0, None, max(1, geometry.n_query // _SAMPLED_QUERIES))
    keys = Keys.of(k[:, :, :: max(1, geometry.n_key // _SAMPLED_KEYS)], q.shape[1])
    logit = abs(bias.scale) * keys.seen_by(q[:, :, rows])[0]
    variance = keys.distance.square().mean(-1, keepdim=True) / q.shape[3]
    lift = logit.square() * variance
    kept = seen = 0
    for side in bias.sides():
        mass = bias.mass(side)
        here = (side.positions[rows] + 1).clamp(0, side.n_key).expand(logit.shape)
        log_tile = logit.new_tensor(math.log(KEY_STEP))
        near = mass.log_mass(rows, here // KEY_STEP).logaddexp(log_tile)
        # Of Gaussian logits, exponentials are on average exp(lift / 2) times those of the bias.
        certain = lift.new_ones(*lift.shape[:2], side.tiles + 1)
        guess = Certificate(mass, rows, lift / 2, near + lift, certain, 1)
        cuts = guess.last_cut(math.log(tolerance / 2))
        window = (here - side.cut(cuts)).double()
        of_tile = torch.nn.functional.max_pool1d(window, _SAMPLED_TILE, 1, _SAMPLED_TILE // 2)
        kept = kept + torch.minimum(of_tile, here).mean((0, 2))
        seen = seen + here.double().mean((0, 2))
    return seen - kept > _COST_IN_KEYS
