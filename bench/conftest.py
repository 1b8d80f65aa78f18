"""Options of a benchmark run, its progress, and its result."""

from pathlib import Path

import pytest
import torch

import environment
import results
from layer import HEAD_DIM, HEADS
from measure import THREADS, build_fma_peak


def pytest_addoption(parser):
    parser.addoption("--length", type=int, default=4096, help="N; a small one for a quick look")
    parser.addoption(
        "--results", type=Path, default=Path(__file__).parent / "results", help="where to write"
    )


def pytest_configure(config):
    torch.set_num_threads(THREADS)
    # A failed check before the timing is enough to say.
    config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used")


@pytest.fixture
def length(request) -> int:
    return request.config.option.length


@pytest.fixture
def record(record_property):
    """Called with the fields of a `results.Row`, it keeps the row."""
    return lambda *fields, **more: record_property("row", results.Row(*fields, **more))


@pytest.fixture(scope="session")
def fma_peak(tmp_path_factory):
    return build_fma_peak(tmp_path_factory.mktemp("fma_peak"))


def row_of(report) -> results.Row | None:
    return dict(report.user_properties).get("row")


def pytest_report_teststatus(report):
    """Shows each measurement when it is made."""
    if report.when != "call" or not report.passed or not row_of(report):
        return None
    *_, measured, target, verdict = row_of(report).cells()
    return "measured", ".", f"{measured}, to be {target}: {verdict}"


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    rows = [row_of(report) for report in terminalreporter.getreports("measured")]
    if exitstatus != 0 or not rows:
        return
    where = {
        "machine": environment.machine(),
        "versions": environment.versions("biased-flash-attn", "torch", "pytest-benchmark"),
        "commit": environment.commit(),
        "setting": {
            "threads": THREADS,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "length": config.option.length,
        },
    }
    path = results.save(rows, config.option.results, where)
    terminalreporter.section("results")
    terminalreporter.write_line(path.with_suffix(".md").read_text())
    terminalreporter.write_line(f"written to {path} and, as a table, beside it")
