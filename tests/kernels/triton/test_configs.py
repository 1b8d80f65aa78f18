"""The rules by which the Triton kernels get their configurations."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from biased_flash_attn.triton_kernels.configs import TABLES, Features

EITHER = (False, True)
FORMS = ("none", "linear", "distance", "cumulative", "log1p_square", "dense", "normalized")
FEATURES = [
    Features(form, *flags, dtype)
    for form in FORMS
    for flags in itertools.product(EITHER, repeat=6)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize("family", TABLES, ids="{0.name}".format)
def test_every_rule_serves_a_problem(family):
    """And one that serves all comes last."""
    *tables, of_forms = TABLES[family]
    for row in (row for table in (*tables, *of_forms.values()) for row in table.values()):
        for kernel, rules in vars(row).items():
            chosen = {next(rule for rule in rules if rule.matches(x)) for x in FEATURES if rules}
            assert chosen == set(rules), kernel
            assert len(rules) == len(set(rules)), kernel
