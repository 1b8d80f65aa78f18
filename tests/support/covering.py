"""Few of many possibilities that have, between them, everything that all have."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

Item = TypeVar("Item", bound=Hashable)


def covering(
    items: Iterable[Item], features: Callable[[Item], Iterable[Hashable]], seed: str
) -> list[Item]:
    """The same items for a seed, in the order in which they add the most features."""
    shuffled = list(items)
    random.Random(seed).shuffle(shuffled)
    remaining = {item: set(features(item)) for item in shuffled}
    missing = set().union(*remaining.values())
    chosen = []
    while missing:
        best = max(remaining, key=lambda item: len(remaining[item] & missing))
        missing -= remaining.pop(best)
        chosen.append(best)
    return chosen
