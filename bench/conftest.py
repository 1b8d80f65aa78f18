"""Options, progress and results of a benchmark run."""

from pathlib import Path

import pytest
import torch

from bench.common.layer import HEAD_DIM, HEADS
from bench.common.measure import THREADS, build_fma_peak
from bench.reports import environment, results


def pytest_addoption(parser):
    parser.addoption("--length", type=int, default=4096, help="N; smaller for a quick run")
    parser.addoption("--results", type=Path, default=results.RESULTS, help="output folder")


def pytest_configure(config):
    torch.set_num_threads(THREADS)
    # When the check before the timing fails, the fixture is not used.
    config.addinivalue_line("filterwarnings", "ignore:Benchmark fixture was not used")


@pytest.fixture
def length(request) -> int:
    return request.config.option.length


@pytest.fixture
def record(request, record_property):
    """A function that takes the fields of a `results.Row` and stores the row. Rows are grouped by
    the headings of modules, which end at a colon."""
    group = request.module.__doc__.partition(":")[0]
    return lambda *fields: record_property("row", results.Row(*fields, group=group))


@pytest.fixture(scope="session")
def fma_peak(tmp_path_factory):
    return build_fma_peak(tmp_path_factory.mktemp("fma_peak"))


def row_of(report) -> results.Row | None:
    return dict(report.user_properties).get("row")


def pytest_report_teststatus(report):
    """Shows each measurement as soon as it is made, and whether it met its target."""
    if report.when != "call" or not report.passed or not row_of(report):
        return None
    row = row_of(report)
    return "measured", ".", ", ".join(filter(None, (row.found(), row.verdict())))


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
    terminalreporter.write_line(f"written to {path} and, as a table, to {path.stem}.md")
