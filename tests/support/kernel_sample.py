"""Which tests of GPU kernels a run executes where all of them would take too long."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
import torch

from tests.support.cases import Case
from tests.support.covering import covering

DTYPES = torch.float32, torch.float16, torch.bfloat16


def drawn_dtype(bias: str, seed: int, backend: str | None = None) -> torch.dtype:
    """One of those that the kernels of a backend take, for tests that run in one of them.

    Compiling kernels for all of them takes too long. The tests of a bias have the same one for a
    seed, so that they share compiled kernels.
    """
    dtypes = DTYPES[1:] if backend == "cuda" else DTYPES
    return dtypes[(zlib.crc32(bias.encode()) + seed) % len(dtypes)]


def sample(items: list[pytest.Item], most: int | None) -> list[pytest.Item]:
    """Of the tests that do not skip, few that have all features; the same for every --seed.

    The first `most` of them are of as many functions as possible.
    """
    chosen = covering([item for item in items if not skipped(item)], features, "tests")
    first = set({item.function: item for item in reversed(chosen)}.values())
    return sorted(chosen, key=lambda item: item not in first)[:most]


def skipped(item: pytest.Item) -> bool:
    return any(all(mark.args) for mark in item.iter_markers("skipif"))


def features(item: pytest.Item) -> Iterator[tuple]:
    """The function and backend; and, in its file, the form of bias in the dtype, trained or not."""
    settings = dict(settings_of(item))
    backend = settings.get("backend")
    yield item.function, backend
    if bias := settings.get("bias"):
        if "drawn_dtype" in item.fixturenames:
            settings["dtype"] = drawn_dtype(bias, 0, backend)
        yield item.path, backend, bias, settings.get("dtype"), settings.get("trained")


def settings_of(item: pytest.Item) -> Iterator[tuple[str, object]]:
    """The parameters of a test, and in place of cases and dictionaries what they hold."""
    for name, value in item.callspec.params.items() if hasattr(item, "callspec") else ():
        held = vars(value) if isinstance(value, Case) else value
        yield from held.items() if isinstance(held, dict) else [(name, value)]
