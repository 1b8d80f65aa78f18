"""Which kernels a run of the tests compiles: a sample that reaches everything."""

from __future__ import annotations

import itertools
from collections.abc import Hashable

from bench.machine_code import compiled
from tests.support.covering import covering


def features(task: compiled.Task, pairs: bool) -> set[Hashable]:
    """Every setting, each kernel at every width; or every pair of settings."""
    bias, variant = bias_and_variant(task.form)
    kernel, width, *others = (
        ("kernel", task.kernel),
        ("width", task.head_dim),
        ("bias", bias),
        ("variant", variant),
        ("dtype", task.dtype),
        ("trained", task.bias_gradient),
    )
    if pairs:
        return set(itertools.combinations([kernel, width, *others], 2))
    return {(kernel, width), *others}


def bias_and_variant(form: str) -> tuple[str, str]:
    """Of a form as compiled.py names it."""
    named = [name for name in compiled.VARIANTS if form.endswith(f"-{name}")]
    variant = max(named, key=len, default="causal")
    return form.removesuffix(f"-{variant}"), variant


def sample(arch: int, pairs: bool = False) -> list[compiled.Task]:
    """Few tasks that have all features; others for each architecture."""
    return covering(compiled.tasks(), lambda task: features(task, pairs), f"sm_{arch}")
