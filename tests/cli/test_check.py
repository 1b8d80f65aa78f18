"""`python -m biased_flash_attn check`: its report, and the faults that it finds."""

from __future__ import annotations

import itertools
import signal
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from biased_flash_attn import backends
from biased_flash_attn.cli import machine, main
from biased_flash_attn.cli.checking import processes, sizes
from biased_flash_attn.cli.checking.accuracy import Error, Row
from biased_flash_attn.cli.checking.forms import FORMS, TIMED
from biased_flash_attn.cli.checking.problems import CALLS, DTYPES, LEFT_OUT
from biased_flash_attn.cli.checking.processes import (
    OUT_OF_TIME,
    Ended,
    OutOfMemory,
    Settings,
    Task,
    Work,
    schedule,
    spread,
)
from biased_flash_attn.cli.checking.report import environment
from biased_flash_attn.cli.checking.timing import FLEX, OURS, PLAIN, Timing
from tests.cli.planted_faults import KERNELS, LENGTH, a_tile_missing, plant

GIBIBYTE = 2**30
module = sys.modules["biased_flash_attn.cli.check"]
EVERY_ROW = [
    Row(form, str(call), dtype, (Error("o", 1e-3, 2e-3, "batch 0, head 0, rows 0 to 127"),))
    for form, call, dtype in itertools.product(FORMS, CALLS, DTYPES)
]
ALL = len(EVERY_ROW)
TIMINGS = [
    Timing(form, {OURS: 1e-3, PLAIN: 2e-3}, {OURS: 3e-3, PLAIN: 3e-3}, {FLEX: "no compiler"})
    for form in TIMED
]


def clock() -> float:
    """Stands still, so that a limit is reached before a test begins or never."""
    return 0.0


NEVER = 3600.0  # seconds for which a test that hangs waits for an event


def settings(seed: int, *forms: str, end: float = NEVER) -> Settings:
    return Settings(forms, "cpu", "cpu", seed, LENGTH, LENGTH, "float32", 16, end, 0.0)


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs the command with events in place of those of processes; returns result and report."""
    monkeypatch.chdir(tmp_path)

    def run(events, *arguments: str):
        monkeypatch.setattr(module, "spread", events)
        given = ("check", "--backend", "cpu", "--length", str(LENGTH), "--seed", "5", *arguments)
        result = CliRunner().invoke(main, given)
        path = tmp_path / "check-report.md"
        return result, path.read_text() if path.exists() else None

    return run


def these(*events):
    return lambda *_: iter(events)


def inline(*forms: str):
    """The rows of some forms, computed in this process."""
    return lambda settings, *_: performed(settings, *checks(replace(settings, forms=forms)))


def checks(settings: Settings) -> list[Task]:
    return [task for task in schedule(settings, clock) if task.kind == "check"]


def performed(settings: Settings, *tasks):
    own = Work(settings)
    for task in tasks:
        yield from own.perform(task)


def test_prepared_forms_are_timed(seed):
    tasks = Task("prepare", "linear"), Task("prepare", "none"), Task("time", "linear")
    (found,) = performed(settings(seed, "none", "linear"), *tasks)
    assert isinstance(found, Timing)
    assert found.form == "linear"


def test_refused_forms_are_not_timed(monkeypatch, seed):
    monkeypatch.setattr(backends.get("cpu"), "refusal", lambda problem: "has no float32")
    tasks = Task("prepare", "linear"), Task("time", "linear")
    assert list(performed(settings(seed, "linear"), *tasks)) == []


def test_out_of_memory_ends_a_task(monkeypatch, seed):
    def fails(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(KERNELS, "forward", fails)
    asked = settings(seed, "none")
    (event,) = performed(asked, checks(asked)[0])
    assert event == OutOfMemory("OutOfMemoryError: CUDA out of memory")


def test_processes_share_the_forms(seed):
    """Slow, as it starts two processes that import PyTorch; what they run is tested above."""
    asked = settings(seed, "none", "linear")
    events = list(spread(asked, 2, NEVER, clock))
    expected = performed(asked, *checks(asked))
    assert {row for row in events if isinstance(row, Row)} == set(expected)
    last = max(n for n, event in enumerate(events) if isinstance(event, Row))
    timings = events[last + 1 :]
    assert {event.form for event in timings} == {"none", "linear"}


def test_no_row_is_started_after_the_time_limit(seed):
    asked = settings(seed, "none", "linear", end=clock())
    expected = [Task("prepare", "none"), Task("prepare", "linear")]
    assert list(schedule(asked, clock)) == expected


def fail(*_) -> None:
    raise RuntimeError("CUDA error: an illegal memory access\nCompile with DSA")


def hang(*_) -> None:
    time.sleep(NEVER)


def test_the_reason_of_a_failed_process_is_reported(monkeypatch, seed):
    monkeypatch.setattr(processes, "work", fail)
    (event,) = spread(settings(seed, "none"), 1, NEVER, clock)
    assert event.task == "check none; causal, D = 64; bfloat16, float16"
    reason = "a process ended with status 1: RuntimeError: CUDA error: an illegal memory access"
    assert event.reason == reason


def test_processes_are_terminated_after_the_time_limit(monkeypatch, seed):
    started = []

    class Worker(processes.Worker):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            started.append(self.process)

    monkeypatch.setattr(processes, "work", hang)
    monkeypatch.setattr(processes, "Worker", Worker)
    events = list(spread(settings(seed, "none", "linear"), 2, clock(), clock))
    assert [event.reason for event in events] == 2 * [OUT_OF_TIME]
    assert [process.exitcode for process in started] == 2 * [-signal.SIGKILL]


def test_a_correct_machine_can_be_trusted(invoke):
    result, report = invoke(these(*EVERY_ROW, *TIMINGS))
    assert result.exit_code == 0, result.output
    verdict = (
        f"This machine can be trusted with the cpu backend: all {ALL} checks passed. Not checked: "
        f"{LEFT_OUT}."
    )
    assert result.output.splitlines()[-1] == verdict
    assert f"**{verdict}**" in report
    assert "| seed | 5 |" in report
    assert "| torch |" in report
    assert report.count("| 0.001 | 0.002 | 0.5 |") == ALL
    assert "| none | forward | 1 | 2 | - | - |" in report
    assert "FlexAttention: no compiler" in result.output
    assert "2.00x" in result.output


def test_the_verdict_names_forms_that_were_not_timed(invoke):
    result, _ = invoke(these(*EVERY_ROW, *TIMINGS[:-2]))
    assert result.exit_code == 0, result.output
    verdict = result.output.splitlines()[-1]
    assert verdict.endswith(f"{LEFT_OUT}, the times of {', '.join(TIMED[-2:])}.")


def test_a_planted_fault_is_reported(invoke, monkeypatch):
    plant(monkeypatch, "backward", 1, a_tile_missing)
    result, report = invoke(inline("distance"))
    assert result.exit_code == 1
    assert "This machine cannot be trusted with the cpu backend: " in result.output
    assert "WRONG" in result.output
    line = "distance; causal, D = 64; float32: gradient of k has an error of"
    assert line in result.output
    assert f"- {line}" in report
    assert "Attach check-report.md to a bug report." in result.output


def test_a_check_without_failures_that_ran_out_of_time_is_not_finished(invoke):
    ended = Ended("none; causal, D = 64; float32", OUT_OF_TIME)
    result, report = invoke(these(*EVERY_ROW[1:], *TIMINGS, ended), "--minutes", "3")
    assert result.exit_code == 3
    verdict = "The check of the cpu backend is not finished: "
    assert f"{verdict}{ALL - 1} checks passed and 1 did not run. Run it again" in result.output
    assert "--minutes 6" in result.output
    assert "trusted" not in result.output
    assert f"**{verdict}" in report


def test_a_failure_is_one_even_if_the_time_was_over(invoke):
    wrong = replace(EVERY_ROW[1], repeats=False)
    result, _ = invoke(these(wrong, *EVERY_ROW[2:], Ended("none", OUT_OF_TIME)))
    assert result.exit_code == 1
    assert f"cannot be trusted with the cpu backend: 1 of {ALL - 1} checks" in result.output


def test_a_machine_on_which_a_process_crashed_is_not_trusted(invoke):
    ended = Ended("none; causal, D = 64", "a process ended with status -11: no message")
    result, report = invoke(these(*EVERY_ROW[1:], *TIMINGS, ended))
    assert result.exit_code == 1
    assert "cannot be trusted with the cpu backend: a process crashed, and 1" in result.output
    assert "- none; causal, D = 64: a process ended with status -11: no message" in report


@pytest.mark.parametrize("minutes", [2, 5])
def test_the_time_limit_is_that_of_the_minutes(invoke, minutes):
    found = []

    def spread(settings, workers, end):
        found.append(end - settings.rows_end)
        return iter(EVERY_ROW)

    invoke(spread, "--minutes", str(minutes))
    after_rows = (1 - sizes.LAST_ROW["cpu"]) * minutes * sizes.SECONDS_PER_MINUTE
    assert found == [pytest.approx(after_rows)]


def test_less_time_than_the_sizes_are_chosen_for_is_refused(invoke):
    result, _ = invoke(these(*EVERY_ROW), "--minutes", "1")
    assert result.exit_code == 2
    assert "1.0 is not in the range x>=2.0" in result.output


def test_refused_calls_are_counted(invoke):
    rows = [
        replace(row, errors=(), refusal="no bfloat16 here") if row.dtype == "bfloat16" else row
        for row in EVERY_ROW
    ]
    result, _ = invoke(these(*rows))
    assert result.exit_code == 0
    assert result.output.count("no bfloat16 here") == 1
    assert f"all {2 * ALL // 3} checks passed. It refuses {ALL // 3} other" in result.output


def test_a_backend_that_refuses_everything_is_not_trusted(invoke):
    rows = [replace(row, errors=(), refusal="an old GPU") for row in EVERY_ROW]
    result, _ = invoke(these(*rows))
    assert result.exit_code == 1
    assert "it refuses every call" in result.output


def test_out_of_memory_is_reported_in_one_sentence(invoke):
    result, report = invoke(these(*EVERY_ROW[:3], OutOfMemory("CUDA out of memory")))
    assert result.exit_code == 1
    assert "Error: out of memory, so this machine could not be checked" in result.output
    assert "--length" in result.output
    assert report is None


def test_a_report_that_cannot_be_written_is_refused_at_once(invoke):
    result, _ = invoke(these(*EVERY_ROW), "--report", "nowhere/report.md")
    assert result.exit_code == 2
    assert "there is no folder nowhere" in result.output
    assert f"all {ALL} checks" not in result.output


def test_a_missing_backend_is_reported_in_one_sentence(monkeypatch):
    report = [backends.Report("cpu", False, "the C++ kernels were not built")]
    monkeypatch.setattr(backends, "report", lambda: report)
    result = CliRunner().invoke(main, ["check", "--backend", "cpu"])
    assert result.exit_code == 1
    assert result.output == (
        "Error: the cpu backend cannot run here: the C++ kernels were not built\n"
    )


@pytest.mark.parametrize(("has_gpu", "chosen"), [(True, "triton"), (False, "cpu")])
def test_the_device_chooses_what_is_checked(monkeypatch, has_gpu, chosen):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    report = [backends.Report(name, True, "") for name in backends.NAMES]
    monkeypatch.setattr(backends, "report", lambda: report)
    if has_gpu:
        monkeypatch.setattr(backends.get("triton"), "device_type", "cuda")
    device = "cuda" if has_gpu else "cpu"
    assert module.choose(None) == (chosen, device)


@pytest.mark.parametrize(
    ("free", "cores", "count", "length"),
    [(80, 32, 24, 8192), (80, 2, 2, 8192), (15, 16, 5, 4096), (2, 16, 1, 4096)],
)
def test_processes_fit_a_gpu_and_its_host(monkeypatch, free, cores, count, length):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIBIBYTE, 80 * GIBIBYTE))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(sizes.os, "cpu_count", lambda: cores)
    assert sizes.processes("cuda") == count
    assert sizes.timed("cuda") == sizes.Timed(length, "bfloat16", 128)


def test_a_gpu_without_bfloat16_is_timed_in_float16(monkeypatch):
    monkeypatch.setattr(sizes, "max_gpu_processes", lambda: 6)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert sizes.timed("cuda").dtype == "float16"


def test_the_report_names_the_gpu_its_driver_and_versions(monkeypatch):
    pytest.importorskip("triton")
    properties = SimpleNamespace(
        name="H100", major=9, minor=0, multi_processor_count=132, total_memory=80 * GIBIBYTE
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(machine, "driver", lambda: "580.1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = environment("cuda", "triton")
    shown = {name: found[name] for name in ("gpu", "driver", "compute_capability", "cuda")}
    assert shown == {
        "gpu": "H100",
        "driver": "580.1",
        "compute_capability": "9.0",
        "cuda": "13.0",
    }
    assert {"torch", "triton", "biased-flash-attn", "processor"} <= found.keys()
