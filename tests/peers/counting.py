"""How many cases of a peer's tests are served, and why the others are refused."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import Protocol, TypeVar

from tests.support.covering import covering


class Case(Protocol):
    """One case of a peer's tests.

    refused: why it cannot be computed here, or "" if a test compares it with an oracle.
    """

    refused: str


Described = TypeVar("Described", bound=Case)


def count(cases: Iterable[Case]) -> tuple[int, dict[str, int]]:
    """The number of served cases, and that of refused ones by reason."""
    reasons = Counter(case.refused for case in cases)
    served = reasons.pop("", 0)
    return served, dict(reasons)


def sampled(
    cases: Iterable[Described], seed: str, alone: str, among: int | None = None
) -> list[Described]:
    """Few of the served cases that contain every pair of values that occurs.

    alone: the field with too many values for pairs, each of which occurs once.
    among: how many cases are drawn first if there are too many to find their pairs.
    """
    served = [case for case in cases if not case.refused]
    if among is not None:
        served = random.Random(seed).sample(served, min(among, len(served)))

    def pairs(case: Described) -> Iterator[Hashable]:
        fields = vars(case).copy()
        yield fields.pop(alone)
        yield from itertools.combinations(fields.items(), 2)

    return covering(served, pairs, seed)
