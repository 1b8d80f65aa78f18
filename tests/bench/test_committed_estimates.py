"""The committed tables of estimates."""

from __future__ import annotations

import itertools
import json
import math
import re

import pytest

pytest.importorskip("triton", reason="needs Triton")

import triton

from bench import RESULTS
from bench.estimates import report, tiles
from bench.estimates.gpu import GPUS
from tests.bench.processes import in_another_process


def estimates_of_alibi(*options: str) -> list[str]:
    """The rows of three kernels, which are compiled and simulated in a few seconds."""
    command = "-m", "bench.estimates.run", "--arch", "90", "--head-dim", "64", "--form", "linear"
    printed = in_another_process(*command, *options).decode()
    rows = [line for line in printed.split("\n\n")[1].splitlines() if "ALiBi" in line]
    assert len(rows) == 3
    return rows


@pytest.mark.slow
def test_committed_estimates_are_current():
    document = (RESULTS / "estimates-sm_90.md").read_text()
    if f"Triton {triton.__version__} " not in document:
        pytest.skip("the estimates are of another version of Triton")
    renew = "run `python -m bench.estimates.run` to renew it"
    assert [row for row in estimates_of_alibi() if row not in document.splitlines()] == [], renew


@pytest.mark.slow
def test_estimates_are_of_the_given_problem():
    committed = estimates_of_alibi()
    assert estimates_of_alibi("--batch", "2", "--heads", "16") == committed
    for row, shorter in zip(committed, estimates_of_alibi("--tokens", "4096"), strict=True):
        times = [float(one.split("|")[-2]) for one in (row, shorter)]
        assert times[0] / times[1] == pytest.approx(16, rel=0.2)


# Prints the configurations that ship, by processor, form, head_dim and kernel; nothing is compiled.
SHIPPED = """
import json
import torch
from biased_flash_attn.triton_kernels import configs
from triton.runtime import driver
from bench.estimates import gpu, kernels, report, run
from bench.machine_code import compiled

found, shipped = [], configs.choose
for arch in gpu.GPUS:
    driver.set_active(compiled.Processor(arch))
    for form in report.FORMS:
        for width in run.WIDTHS:
            chosen = {}
            def choose(kernel, *rest):
                return chosen.setdefault(kernel, shipped(kernel, *rest))
            with kernels.choosing(choose):
                compiled.binaries(form, torch.bfloat16, width, form != "none", ())
            for name, field in kernels.FIELDS.items():
                if form in report.FORMS_WITH.get(name, report.FORMS):
                    one = chosen[field]
                    sizes = one.block_m, one.block_n, one.num_warps, one.num_stages
                    found.append((arch, report.FORMS[form], width, report.NAMES[name], *sizes))
print(json.dumps(found))
"""


def rows_of_kernels(document: str) -> list[list[str]]:
    rows = [line.strip("|").split("|") for line in document.splitlines()]
    columns = len(report.KERNEL_COLUMNS)
    _, *kernels = [[cell.strip() for cell in row] for row in rows if len(row) == columns]
    return [row for row in kernels if row[0] in report.FORMS.values()]


@pytest.mark.slow
def test_committed_estimates_are_of_the_configurations_that_ship():
    shipped = json.loads(in_another_process("-c", SHIPPED))
    stated = [
        (arch, form, int(width), name, tile)
        for arch in GPUS
        for form, width, name, tile, *_ in rows_of_kernels(committed(arch))
    ]
    tiles = [(*row, f"{m} x {n}, {warps}, {stages}") for *row, m, n, warps, stages in shipped]
    assert sorted(tiles) == sorted(stated), "run `python -m bench.estimates.run` to renew them"


PASSES_OF_ALL = report.NAMES[tiles.FORWARD], report.NAMES[tiles.DQ], report.NAMES[tiles.DKV]


def committed(arch: int) -> str:
    return (RESULTS / f"estimates-sm_{arch}.md").read_text()


@pytest.mark.parametrize("arch", GPUS)
def test_no_warps_repeat_products_of_others(arch):
    """As they do if a tile has too few rows for all of them. Factors of sums are an eighth of a
    head of 64; vectors of relative biases have products of their own."""
    products = {
        (form, width, name): float(products)
        for form, width, name, _, _, products, *_ in rows_of_kernels(committed(arch))
        if name in PASSES_OF_ALL and "relative" not in form
    }
    assert products
    assert {kernel: most for kernel, most in products.items() if most > 1.13} == {}


# Each bias, and one that computes the same and more.
SIMPLER = (
    ("none", "linear"),
    ("none", "dense"),
    ("none", "relative"),
    ("linear", "cumulative"),
    ("linear", "distance"),
    ("cumulative", "cumulative-gain"),
    ("cumulative", "log1p_square-gain"),
    ("distance", "normalized"),
    ("relative", "relative_last"),
)


@pytest.mark.parametrize("arch", GPUS)
def test_no_bias_is_slower_than_one_that_computes_more(arch):
    """By more than the error of the estimates; otherwise another configuration was better."""
    document = committed(arch)
    rows = rows_of_kernels(document)
    times = {(form, width, name): ms for form, width, name, *_, ms in rows}
    for (simple, other), width, name in itertools.product(SIMPLER, ("64", "128"), PASSES_OF_ALL):
        less, more = (float(times[report.FORMS[form], width, name]) for form in (simple, other))
        assert less <= (1 + _stated_error(document)) * more, (simple, other, width, name)


def test_estimates_are_labelled_with_their_error():
    for arch in GPUS:
        document = committed(arch)
        assert "**Estimates, not measurements: none of these kernels has been timed.**" in document
        assert math.isclose(
            _stated_error(document),
            _error_of(document),
            abs_tol=0.006,
        )


def _stated_error(document: str) -> float:
    return int(re.search(r"error of each is\n±(\d+)%", document)[1]) / 100


def _error_of(document: str) -> float:
    """The error of the calibration table, in which errors are rounded to percents."""
    rows = (line for line in document.splitlines() if line.endswith("| predicted |"))
    errors = sorted(abs(int(re.search(r"([+-]\d+)%", row)[1])) for row in rows)
    return errors[math.ceil(0.9 * len(errors)) - 1] / 100
