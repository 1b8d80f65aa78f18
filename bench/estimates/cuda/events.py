"""The events that the warps of each kernel wait for and signal, in the order of the code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from biased_flash_attn.cuda_kernels.variants import BLOCK_M, TILE_QUERIES, BackwardAll, Variant

from .simulate import OWN, Handover

FORWARD, ALL, DQ, DKV = "forward", "backward", "dQ", "dK, dV"
TILES, KEYS, VALUES = "tiles", "keys", "values"
# Of the backward pass in one pass, what the warps write and read together.
LOGITS, FREE_LOGITS, SUMS, FREE_SUMS = "dS", "read dS", "dq", "added dq"
DIAGONALS, FREE_DIAGONALS = "terms of diagonals", "read terms"
Events = tuple[str, ...]


@dataclass(frozen=True)
class Parts:
    """Of a warp that computes: before the loop over tiles, in it, in its last iteration, after."""

    waits: tuple[Events, Events, Events, Events]
    releases: tuple[Events, Events, Events, Events]


@dataclass(frozen=True)
class Summer:
    """A warp that sums dS, with the events of a tile. counts, outer: see paths.of_summer."""

    waits: Events
    releases: Events
    counts: Mapping[str, int] = field(hash=False)
    outer: Sequence[int] = ()


_OF_TILES = (TILES,), (TILES,), ()
_PARTS = {
    FORWARD: Parts(
        ((OWN, KEYS, KEYS), (VALUES, KEYS), (VALUES,), (VALUES,)),
        ((KEYS,), (KEYS, VALUES), (KEYS, VALUES), (VALUES, OWN)),
    ),
    DQ: Parts(((OWN, TILES), *_OF_TILES), ((), *_OF_TILES)),
    DKV: Parts(((OWN,), *_OF_TILES), ((), *_OF_TILES)),
}

# Multiply-adds of a warp with 16 rows and 16 columns of dS, all of a tile.
_PRODUCTS = BLOCK_M // 16 * TILE_QUERIES // 16
_OVER_KEYS = Summer(
    (TILES, LOGITS, FREE_SUMS),
    (SUMS, FREE_LOGITS, TILES),
    {"HMMA": _PRODUCTS, "STS": 2 * TILE_QUERIES // 8},  # stores two sums of 8 queries at a time
)
_OVER_QUERIES = Summer((TILES, LOGITS), (FREE_LOGITS, TILES), {"HMMA": _PRODUCTS})
# A tile has 191 diagonals, of which each of two warps has 32 at a time, three times. Of the 8 warps
# that compute, 12 in all have terms of these, and each has them in 8 rows.
_SPANS, _TERMS = 3, 8 * 12
_ALONG_DIAGONALS = Summer((DIAGONALS,), (FREE_DIAGONALS,), {"LDS": _TERMS}, (_SPANS,))
_STAGES_OF_DIAGONALS = 2


def parts(name: str, variant: Variant) -> Parts:
    if name != ALL:
        return _PARTS[name]
    of_table = _sums_table(variant)
    waits = TILES, *[FREE_DIAGONALS] * of_table, FREE_LOGITS, LOGITS, FREE_SUMS
    releases = *[DIAGONALS] * of_table, LOGITS, FREE_LOGITS, SUMS, TILES
    after = (FREE_LOGITS,) * _stages_of_logits(variant)
    return Parts(((OWN,), waits, waits, after), ((), releases, releases, ()))


def handovers(variant: Variant) -> list[Handover]:
    if not isinstance(variant, BackwardAll):
        return []
    found = [
        Handover(LOGITS, LOGITS),
        Handover(FREE_LOGITS, FREE_LOGITS, ahead=_stages_of_logits(variant)),
        Handover(SUMS, FREE_SUMS, ahead=1, bytes=variant.sums_bytes),
    ]
    if _sums_table(variant):
        found.append(Handover(DIAGONALS, DIAGONALS))
        found.append(Handover(FREE_DIAGONALS, FREE_DIAGONALS, ahead=_STAGES_OF_DIAGONALS))
    return found


def summers(variant: Variant) -> tuple[Summer, ...]:
    if not isinstance(variant, BackwardAll):
        return ()
    if _sums_table(variant):
        return _ALONG_DIAGONALS, _ALONG_DIAGONALS
    return (_OVER_KEYS, _OVER_QUERIES) if variant.has_sums else ()


def _stages_of_logits(variant: BackwardAll) -> int:
    return 2 if variant.has_sums else 1


def _sums_table(variant: BackwardAll) -> bool:
    return variant.trained and variant.form == "Distance"
