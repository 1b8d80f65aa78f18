"""What one process of `check` does: rows first, then timings once it is told to go on.

Events are pickled to stdout. Before the first timing the process waits for a line on stdin, so that
several processes can compile side by side and still be timed one after the other.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import accuracy
from .accuracy import Row
from .failures import described, is_out_of_memory
from .problems import CALLS, DTYPES
from .timing import Race, Timing

# On CPUs FlexAttention has no training to compare with and takes 20 s to compile, so that it
# competes in one form only.
FLEX_ON_CPUS = "linear"


@dataclass(frozen=True)
class Settings:
    """What to check. Times are in seconds since the epoch, as several processes share them."""

    forms: tuple[str, ...]
    backend: str
    device: str
    seed: int
    length: int
    timed_length: int
    timed_dtype: str
    timed_head_dim: int
    rows_end: float  # no new group of rows is begun after it
    peers_end: float  # nor is FlexAttention compiled after this


@dataclass(frozen=True)
class Ready:
    """All rows are there, and what will be timed is compiled."""


@dataclass(frozen=True)
class OutOfMemory:
    """The device had too little memory; nothing follows."""

    reason: str


Event = Row | Ready | Timing | OutOfMemory


def events(settings: Settings) -> Iterator[Event]:
    """Rows, Ready and timings."""
    torch.set_float32_matmul_precision("highest")  # of the naive yardstick
    try:
        yield from rows(settings)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        yield OutOfMemory(described(error))
        return
    races = [prepared(form, settings) for form in settings.forms]
    yield Ready()
    for race in races:
        yield race.timing()


def rows(settings: Settings) -> Iterator[Row]:
    where = settings.length, settings.seed, settings.device, settings.backend
    for call in CALLS:
        for form in settings.forms:
            if time.time() > settings.rows_end:
                return
            yield from accuracy.rows(form, call, *where)


def prepared(form: str, settings: Settings) -> Race:
    race = Race(
        form,
        settings.timed_length,
        settings.timed_head_dim,
        DTYPES[settings.timed_dtype],
        settings.seed,
        settings.device,
        settings.backend,
    )
    wanted = settings.device != "cpu" or form == FLEX_ON_CPUS
    race.prepare(with_flex=wanted and time.time() < settings.peers_end)
    return race


def main() -> None:
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    for event in events(pickle.load(sys.stdin.buffer)):
        pickle.dump(event, channel)
        channel.flush()
        if isinstance(event, Ready):
            sys.stdin.buffer.readline()
