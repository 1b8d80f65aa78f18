"""Attention in a ring of ranks is that of one process, forward and backward."""

from __future__ import annotations

import pytest

from context_parallel_cases import CASES
from ranks import outcomes

MODULE = "context_parallel_cases"


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def exact(request, tmp_path_factory):
    seed = request.config.option.seed
    return outcomes(request.param, tmp_path_factory.mktemp("ranks"), MODULE, "exact", seed)


@pytest.fixture(scope="module")
def skipped(request, tmp_path_factory):
    seed = request.config.option.seed
    return outcomes(2, tmp_path_factory.mktemp("ranks"), MODULE, "skipped", seed)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[*map(str, CASES)])
def test_every_pair_of_settings_is_exact(exact, number):
    found, errors = exact
    for of_rank, error in zip(found, errors, strict=True):
        assert of_rank is not None, error
        assert of_rank[number] == ""


@pytest.mark.parametrize("what", ["exact", "tolerance", "needle", "infinity"])
def test_what_is_left_out_does_not_matter(skipped, what):
    found, errors = skipped
    for of_rank, error in zip(found, errors, strict=True):
        assert of_rank is not None, error
        assert of_rank[what] == [""] * len(of_rank[what])
        assert of_rank[what]
