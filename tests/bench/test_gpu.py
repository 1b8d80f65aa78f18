"""A rehearsal of the GPU benchmark without a GPU: every step except timing and compiled peers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import ROOT
from bench.common.correctness import check_same
from bench.common.implementations import ours
from bench.common.layer import draw
from bench.gpu import run
from bench.gpu.baselines import SDPBackend, flex, sdpa_dense
from bench.gpu.case import Measurement
from bench.gpu.comparisons import BOTH, CUDA, DECODING, NONE, SKIPPING, TRAINED, TRITON, Case
from bench.gpu.decoding import Decoding
from bench.gpu.device import Gpu, Rehearsal
from bench.reports import environment, results
from biased_flash_attn.cuda_kernels import forms, nvrtc
from biased_flash_attn.cuda_kernels.launch import Launcher
from tests.emulator.cuda_backend import emulated
from tests.emulator.cuda_driver import EmulatedDriver
from tests.kernels.triton.backend import EMULATED, KERNELS

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(KERNELS is None or not EMULATED, reason="rehearses the case without a GPU"),
    pytest.mark.usefixtures("gpu"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, for intended infinities
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # from FlexAttention
]


@pytest.fixture
def flex_backward(monkeypatch):
    """FlexAttention refuses gradients on the CPU, although its uncompiled version has them."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.mark.parametrize("bias", [NONE, "kerple_log", "cable", SKIPPING])
def test_cases_measure_every_comparison(flex_backward, bias):
    measurement = Measurement(Case(bias, 16, 32), Rehearsal())
    measurement.prepare()
    rows = list(measurement.rows())
    failed = {row.work for row in rows if row.failure}
    assert failed == {row.work for row in rows if "cuDNN" in row.work or "efficient" in row.work}
    assert all(
        (row.values and row.aim) or "FlexAttention" in row.work for row in rows if row.target
    )
    assert any("memory" in row.work for row in rows) == (bias in TRAINED)


@pytest.fixture
def hopper(seed):
    with emulated(Launcher(EmulatedDriver(seed))):
        yield


NEEDS_NVRTC = pytest.mark.skipif(bool(nvrtc.missing()), reason=nvrtc.missing())


@NEEDS_NVRTC
@pytest.mark.parametrize("bias", [NONE, "cable", SKIPPING])
def test_cuda_kernels_are_compared_with_every_alternative(hopper, flex_backward, bias):
    measurement = Measurement(Case(bias, 16, 32, CUDA), Rehearsal())
    measurement.prepare()
    rows = list(measurement.rows())
    assert all(row.work.startswith("CUDA kernels, D = 16, N = 32, ") for row in rows)
    failed = {row.work for row in rows if row.failure}
    assert failed == {row.work for row in rows if "cuDNN" in row.work or "efficient" in row.work}
    assert any("FlexAttention" in row.work for row in rows)
    assert any("the Triton kernels" in row.work for row in rows) == (bias != SKIPPING)


@NEEDS_NVRTC
def test_unsupported_calls_have_rows_with_the_reason(hopper, monkeypatch):
    """A trained bias stands for one whose gradients have no kernels."""
    reason = "has no gradients of the form 'linear' of the bias"

    def refusal(problem):
        return reason if any(x.requires_grad for x in problem.form.tensors) else ""

    monkeypatch.setattr(forms, "refusal", refusal)
    measurement = Measurement(Case("alibi", 16, 32, CUDA), Rehearsal())
    measurement.comparisons = [
        replace(x, bias="alibi, trained") if x.mode == BOTH else x
        for x in measurement.comparisons
        if "FlexAttention" not in x.other
    ]
    measurement.prepare()
    failures = {row.failure for row in measurement.rows()}
    assert failures == {None, f"backend='cuda' {reason}"}


def test_cuda_kernels_are_measured_where_they_run():
    sizes = (64, 32), (16,), (NONE, "alibi")
    elsewhere = run.cases_of(*sizes, cuda=False)
    assert {case.backend for case in elsewhere} == {TRITON}
    assert len(elsewhere) == 4
    hopper = run.cases_of(*sizes, cuda=True)
    assert [(case.length, case.backend) for case in hopper] == [
        *[(64, CUDA), (64, CUDA), (64, TRITON), (64, TRITON), (32, CUDA), (32, CUDA)]
    ]


def test_reasons_why_cuda_kernels_cannot_run_are_stated(monkeypatch):
    device = Gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.refusal()


def test_decoding_measures_every_bias_and_batch():
    measurement = Decoding(Case(DECODING, 16, Rehearsal.decoding_length), Rehearsal())
    measurement.prepare()
    rows = list(measurement.rows())
    assert len({row.work for row in rows}) == len(rows) == 8
    assert all(row.values for row in rows)
    assert [row.target for row in rows] == 4 * [80, None]


def test_different_steps_are_detected():
    measurement = Decoding(Case(DECODING, 16, Rehearsal.decoding_length), Rehearsal())
    step = measurement.decoder("alibi", 1, Rehearsal.decoding_length)
    step.k = step.k.flip(2)
    with pytest.raises(AssertionError, match="the result of FlexAttention differs"):
        measurement.against_flex(step, "a step")


@pytest.mark.parametrize(
    "name", [*(f"{bias}, fixed" for bias in TRAINED), *filter(None, TRAINED.values())]
)
def test_flex_attention_has_the_same_bias(flex_backward, name):
    inputs = draw(40, torch.float32, 16, batch=2, heads=2)
    expected = ours(inputs, name)()
    found = flex(inputs, name, Rehearsal().compiled)()
    assert found.keys() == expected.keys()
    check_same(found, expected)


def test_dense_bias_has_the_same_results():
    inputs = draw(40, torch.float32, 16, batch=2, heads=2)
    mine = ours(inputs, "kerple_log, fixed")()
    check_same(sdpa_dense(inputs, "kerple_log", SDPBackend.MATH)(), mine)


def test_different_results_are_detected():
    inputs = draw(40, torch.float32, 16, heads=2)
    with pytest.raises(AssertionError, match=r"^different results: [oqkv] differs"):
        check_same(ours(inputs, "kerple_log, fixed")(), ours(inputs, None)())


def test_calls_are_enqueued_before_they_are_timed(monkeypatch):
    steps = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            steps.append("record")

        def synchronize(self):
            steps.append("synchronize")

        def elapsed_time(self, end):
            return 2.0

    # monkeypatch fails if torch does not have these names.
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: steps.append("sleep"))
    device = Gpu()
    device.flushing = torch.ones(2)
    assert device.seconds(lambda: steps.append("call")) == 0.002
    assert steps == ["sleep", "record", "call", "record", "synchronize"]
    assert (device.flushing == 0).all()


def test_peak_memory_is_that_of_the_call(monkeypatch):
    held = {"now": 100, "peak": 1000}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: held["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: held["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: held.update(peak=100))
    assert Gpu().peak_bytes(lambda: held.update(peak=150)) == 50


def test_results_name_the_gpu(monkeypatch, tmp_path):
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=2**36,
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    where = {
        "machine": environment.gpu(),
        "versions": environment.gpu_versions(),
        "commit": "abc",
        "setting": {"tokens": 1, "hidden": 1},
    }
    reasons = {"failure": "OutOfMemoryError: no room for a | b", "aim": "fast"}
    met = results.Row("this", "bfloat16", [2.0], "x", ">=", 1.5, [1.0], [2.0], aim="fast")
    failed = results.Row("that", "bfloat16", [], "x", ">=", 1.5, **reasons)
    path = results.save([met, failed], tmp_path, where)
    assert path.parent.name == "nvidia-h100-80gb-hbm3"
    text = path.with_suffix(".md").read_text()
    assert "failed: OutOfMemoryError: no room for a / b" in text
    assert results.aims([met, failed]) == [["fast", ">= 1.5x", "1 of 2", "2.00x", "this"]]


def test_tables_show_the_numbers_of_their_json_files():
    for path in results.RESULTS.glob("*/????-??-??-????*.json"):
        table = results.markdown(json.loads(path.read_text()))
        assert path.with_suffix(".md").read_text() == table


# The cases after the first one, which is of the CUDA kernels if they can be compiled.
LATER = [("Triton", 64)] if nvrtc.missing() else [("Triton", 32), ("CUDA", 64)]


def test_results_are_written_immediately(tmp_path):
    command = [sys.executable, "-m", "bench.gpu.run", "--rehearse", "--results", tmp_path]
    options = ["--lengths", "32", "64", "--head-dims", "16", "--biases", NONE, "--commit", "abc"]
    # There is no time for a second wave.
    done = subprocess.run(
        [*command, *options, "--minutes", "0"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (path,) = tmp_path.glob("rehearsal/*.json")
    result = json.loads(path.read_text())
    assert result["commit"] == "abc"
    assert {row["work"].split(", ")[1] for row in result["rows"]} == {"D = 16"}
    assert path.with_suffix(".md").read_text() in done.stdout
    if run.AT_ONCE == 1:
        cases = [f"{kind} kernels, D = 16, N = {n}: none" for kind, n in LATER]
        assert result["setting"]["not_measured"] == cases


def test_reasons_of_failed_processes_are_reported():
    process = run.Process(Case("no such bias", 16, 32), rehearse=True)
    process.get_ready()
    (row,) = process.rows()
    assert not process.end()
    assert row.failure.startswith("the process ended with 1: KeyError: 'no such bias'")


def test_hanging_cases_are_terminated(monkeypatch):
    monkeypatch.setattr(run, "LIMIT", 0.1)
    process = run.Process(Case(NONE, 16, 32), rehearse=True)
    process.get_ready()
    (row,) = process.rows()
    assert not process.end()
    assert row.failure.startswith("the process ended with -9")
