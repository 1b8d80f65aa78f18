"""The rules that choose the configurations of the Triton kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from biased_flash_attn.triton_kernels.configs import TABLES, Config, Features

EITHER = (False, True)
FORMS = (
    "none",
    "linear",
    "distance",
    "cumulative",
    "log1p_square",
    "dense",
    "normalized",
    "relative",
    "relative_last",
)
FEATURES = [
    Features(form, *flags, dtype)
    for form in FORMS
    for flags in itertools.product(EITHER, repeat=6)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("family", TABLES, ids="{0.name}".format)
def test_every_rule_matches_a_problem(family):
    """And the last one matches every problem."""
    found = TABLES[family]
    tables = found.half, found.half_packed, found.float32, found.half_relative
    for row in (row for x in (*tables, *found.half_of_forms.values()) for row in x.values()):
        for kernel, rules in vars(row).items():
            chosen = {next(rule for rule in rules if rule.matches(x)) for x in FEATURES if rules}
            assert chosen == set(rules), kernel
            assert len(rules) == len(set(rules)), kernel


@pytest.mark.parametrize("name", ["LARGEST_TILE", "PLAN_QUERIES"])
def test_blocks_larger_than_kernels_assume_are_refused(name, monkeypatch):
    monkeypatch.setattr(f"{Config.__module__}.{name}", 64)
    with pytest.raises(ValueError, match="Config"):
        Config(128, 16)
