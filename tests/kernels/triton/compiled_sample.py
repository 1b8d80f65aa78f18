"""Which kernels a run of the tests compiles: a sample that reaches everything."""

from __future__ import annotations

import random
from collections.abc import Hashable

from bench.machine_code import compiled


def features(task: compiled.Task) -> set[tuple[str, Hashable]]:
    """Every width is to be seen with each kernel; every form, variant and dtype with some."""
    values = *bias_and_variant(task.form), task.dtype, task.bias_gradient
    return {(task.kernel, task.head_dim), *(("any kernel", value) for value in values)}


def bias_and_variant(form: str) -> tuple[str, str]:
    """Of a form as compiled.py names it."""
    named = [name for name in compiled.VARIANTS if form.endswith(f"-{name}")]
    variant = max(named, key=len, default="causal")
    return form.removesuffix(f"-{variant}"), variant


def sample(arch: int) -> list[compiled.Task]:
    """Few tasks that have, between them, the features of all; others for each architecture."""
    remaining = [(task, features(task)) for task in compiled.tasks()]
    random.Random(f"0 sm_{arch}").shuffle(remaining)
    missing = set().union(*(has for _, has in remaining))
    chosen = []
    while missing:
        task, has = max(remaining, key=lambda one: len(one[1] & missing))
        missing -= has
        chosen.append(task)
    return chosen
