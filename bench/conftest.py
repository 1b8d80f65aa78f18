"""Options, progress and results of a benchmark run."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from bench.common.layer import HEAD_DIM, HEADS
from bench.common.measure import THREADS, build_fma_peak
from bench.reports import environment, results

# What applies to all rows of a folder, and the libraries that they depend on.
PARTS = {
    "cpu": (
        lambda config: {
            "threads": THREADS,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "length": config.option.length,
        },
        ("torch",),
    ),
    "models": (
        lambda config: {"threads": THREADS},
        ("torch", "transformers", "sentence-transformers", "chronos-forecasting"),
    ),
    "schemes": (lambda config: {"threads": THREADS}, ("torch",)),
}


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
    the headings of modules, which end at a colon; each folder of modules has a file of results."""
    group, part = request.module.__doc__.partition(":")[0], request.path.parent.name
    record_property("part", part)
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
    rows = defaultdict(list)
    for report in terminalreporter.getreports("measured"):
        rows[dict(report.user_properties)["part"]].append(row_of(report))
    if exitstatus != 0 or not rows:
        return
    for part, measured in rows.items():
        setting, libraries = PARTS[part]
        where = {
            "machine": environment.machine(),
            "versions": environment.versions("biased-flash-attn", *libraries, "pytest-benchmark"),
            "commit": environment.commit(),
            "setting": setting(config),
        }
        suffix = "" if part == "cpu" else f"-{part}"
        path = results.save(measured, config.option.results, where, suffix=suffix)
        terminalreporter.section(f"results: {part}")
        terminalreporter.write_line(path.with_suffix(".md").read_text())
        terminalreporter.write_line(f"written to {path} and, as a table, to {path.stem}.md")
