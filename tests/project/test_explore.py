"""The exploration of seeds, on tests made for it."""

from __future__ import annotations

import math
import time

import pytest
from rich.console import Console
from rich.progress import Progress

from tests.explore.__main__ import Worker, explore
from tests.explore.findings import Findings
from tests.explore.rounds import Case, Result, Rounds

UNLUCKY = """
import pytest

@pytest.fixture
def drawn(request):
    return request.config.option.seed

def test_of_most_seeds(drawn):
    assert drawn != 4

def test_of_all_seeds(drawn):
    pass

def test_of_no_seed():
    pytest.skip("not here")
"""
CRASHING = """
import os

def test_of_no_seed():
    os.abort()
"""

# What pytest keeps between runs would mix those of different tests.
ALONE = ("-p", "no:cacheprovider", "--import-mode=importlib")


@pytest.fixture
def file_of(tmp_path, monkeypatch):
    """Writes a file of tests, in a folder without the configuration of these ones."""

    def write(text: str) -> str:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "pytest.ini").touch()
        (tmp_path / "test_it.py").write_text(text)
        return "test_it.py"

    return write


def results(file: str, seeds: range, end: float = math.inf) -> list[Result]:
    sent = []
    pytest.main([file, *ALONE], [Rounds(seeds, end, sent.append)])
    return [x for x in sent if isinstance(x, Result)]


@pytest.fixture
def findings():
    return Findings(Console(record=True, width=200))


def test_each_round_runs_every_test_with_its_seed(file_of, findings):
    found = results(file_of(UNLUCKY), range(3, 6))
    assert len(found) == 9
    assert [x.case.seed for x in found] == [3, 3, 3, 4, 4, 4, 5, 5, 5]
    (failed,) = [x for x in found if x.failure]
    assert failed.case == Case("test_it.py::test_of_most_seeds", 4)
    assert "assert 4 != 4" in failed.failure
    assert sum(x.skipped for x in found) == 3

    for result in found:
        findings.add(result)
    findings.summarize()
    text = findings.console.export_text()
    assert "pytest 'test_it.py::test_of_most_seeds' --seed=4" in text
    assert [x.strip() for x in text.splitlines()[-2].split("│")][1:5] == ["all", "3", "6", "1"]


def test_no_test_begins_after_the_end(file_of):
    assert results(file_of(UNLUCKY), range(3, 6), end=time.time() - 1) == []


def test_a_bound_that_is_nearly_reached_is_reported(findings):
    ratios = {1: 0.75, 2: 0.9, 3: 0.1}
    for seed, ratio in ratios.items():
        findings.add(Result(Case("tests/test_it.py::test_sums[a]", seed), "", ratio, False))
    findings.summarize()
    first, *_ = findings.console.export_text().splitlines()
    assert first.startswith("0.90 of its bound")
    assert first.endswith("pytest 'tests/test_it.py::test_sums[a]' --seed=2")
    assert not findings.failures


@pytest.mark.slow  # three processes that import PyTorch
def test_a_process_that_dies_is_a_failure_and_is_replaced(file_of, findings):
    arguments = file_of(CRASHING), *ALONE
    with Progress(console=findings.console) as progress:
        explore([Worker(arguments, range(7, 9), time.time() + 3600)], findings, progress)
    text = findings.console.export_text()
    for seed in (7, 8):
        assert f"pytest 'test_it.py::test_of_no_seed' --seed={seed}" in text
    assert findings.failures.total() == 2
