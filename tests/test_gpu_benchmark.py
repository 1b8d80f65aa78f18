"""The GPU benchmark, rehearsed without a GPU: every step but the clock and the compiled peers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gpu
from biased_flash_attn import backends
from comparisons import NONE, TRAINED, Case
from device import Rehearsal
from gate import check_same
from gpu_case import Measurement
from gpu_sides import SDPBackend, flex, sdpa_dense
from layer import draw
from sides import ours

KERNELS = backends.kernels("triton")
pytestmark = [
    pytest.mark.skipif(KERNELS is None or not KERNELS.INTERPRETED, reason="interprets Triton"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of infinities that are meant
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # so does what it uses instead
]


@pytest.fixture
def flex_backward(monkeypatch):
    """On the CPU FlexAttention refuses gradients, which its uncompiled version computes."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.mark.parametrize("bias", [NONE, "kerple_log", "cable"])
def test_a_case_measures_everything_that_can_be(flex_backward, bias):
    measurement = Measurement(Case(bias, 16, 32), Rehearsal())
    measurement.prepare()
    rows = list(measurement.rows())
    failed = {row.work for row in rows if row.failure}
    assert failed == {row.work for row in rows if "cuDNN" in row.work or "efficient" in row.work}
    assert all(
        (row.values and row.aim) or "FlexAttention" in row.work for row in rows if row.target
    )
    assert any("memory" in row.work for row in rows) == (bias != NONE)


@pytest.mark.parametrize("variant", ["fixed", "trained"])
@pytest.mark.parametrize("bias", TRAINED)
def test_flex_attention_is_given_the_same_bias(flex_backward, bias, variant):
    name = TRAINED[bias] if variant == "trained" else f"{bias}, fixed"
    if name is None:
        pytest.skip("never trained")
    inputs = draw(40, torch.float32, 16, batch=2, heads=2)
    expected = ours(inputs, name)()
    found = flex(inputs, name, Rehearsal().compiled)()
    assert found.keys() == expected.keys()
    check_same(found, expected)


def test_a_dense_bias_is_the_same_bias():
    inputs = draw(40, torch.float32, 16, batch=2, heads=2)
    mine = ours(inputs, "kerple_log, fixed")()
    check_same(sdpa_dense(inputs, "kerple_log", SDPBackend.MATH)(), mine)


def test_what_differs_is_noticed():
    inputs = draw(40, torch.float32, 16, heads=2)
    with pytest.raises(AssertionError, match=r"^another result: [oqkv] differs"):
        check_same(ours(inputs, "kerple_log, fixed")(), ours(inputs, None)())


def test_results_are_written_as_they_come(tmp_path):
    command = [sys.executable, Path(gpu.__file__), "--rehearse", "--results", tmp_path]
    options = ["--lengths", "32", "64", "--head-dims", "16", "--biases", NONE, "--commit", "abc"]
    # No time for a second wave.
    done = subprocess.run(
        [*command, *options, "--minutes", "0"], capture_output=True, text=True, check=True
    )
    (path,) = tmp_path.glob("rehearsal/*.json")
    result = json.loads(path.read_text())
    assert result["commit"] == "abc"
    assert {row["work"].partition(",")[0] for row in result["rows"]} == {"D = 16"}
    assert path.with_suffix(".md").read_text() in done.stdout
    if gpu.AT_ONCE == 1:
        assert result["setting"]["not_measured"] == ["D = 16, N = 64: none"]


def test_a_case_whose_process_ends_badly_says_so():
    process = gpu.Process(Case("no such bias", 16, 32), rehearse=True)
    process.get_ready()
    (row,) = process.rows()
    assert not process.end()
    assert row.failure.startswith("the process ended with 1: KeyError: 'no such bias'")


def test_a_case_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(gpu, "LIMIT", 0.1)
    process = gpu.Process(Case(NONE, 16, 32), rehearse=True)
    process.get_ready()
    (row,) = process.rows()
    assert not process.end()
    assert row.failure.startswith("the process ended with -9")
