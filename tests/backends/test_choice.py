"""The choice of a backend for GPUs that this machine need not have."""

from __future__ import annotations

import contextlib
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from biased_flash_attn.triton_kernels import refusals
from biased_flash_attn.triton_kernels.refusals import OLDEST, Refusal, refusal, release

from biased_flash_attn import backends
from biased_flash_attn.backends import CONTEXT_PARALLELISM, DECODING
from biased_flash_attn.backends.protocol import ATTENTION
from biased_flash_attn.cuda_kernels import nvrtc
from biased_flash_attn.forms import Dense, Distance, Geometry, Linear
from biased_flash_attn.problem import Problem
from biased_flash_attn.shared_memory import block_bytes
from tests.triton_versions import ARCHITECTURES, BEGIN, END, PAGE, TOO_OLD, written

WRONG = Refusal(
    "3.6.0",
    "3.7.0",
    reason="it computes wrong gradients",
    remedy="install triton 3.7.1 or newer",
    architectures=frozenset({"sm_90"}),
)


@pytest.fixture
def other_gpu(monkeypatch):
    """Simulates a GPU that this machine need not have, and its compiler."""
    triton = pytest.importorskip("triton")
    from biased_flash_attn.triton_kernels import processors

    gpu = processors.Processor("cuda", 90, block_bytes(90))
    monkeypatch.setattr(processors, "processor", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "missing", lambda: "")
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    monkeypatch.setattr(refusals, "REFUSALS", ())


def on_gpu(
    dtype: torch.dtype = torch.bfloat16,
    dims: tuple[int, int] = (64, 64),
    form=None,
    trained: bool = False,
) -> Problem:
    """A problem on a GPU: the choice reads no more of q than this stand-in has."""
    x = torch.zeros(1, 2, 16, dims[0], requires_grad=trained)
    v = torch.zeros(1, 2, 16, dims[1])
    q = SimpleNamespace(
        dtype=dtype, device=torch.device("cuda", 0), shape=x.shape, requires_grad=trained
    )
    form = Linear(torch.zeros(1, 2)) if form is None else form
    return Problem(q, x, v, form, Geometry(16, 16), 1.0, 0.0, "")


def chosen(problem: Problem, call: str = ATTENTION) -> tuple[str, list[str]]:
    """The chosen backend, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = backends.choose(None, problem, call)
    return name, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("dims", [(64, 64), (8, 256), (96, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hopper_gpus_prefer_the_cuda_kernels(other_gpu, dtype, dims, trained):
    table = Distance(torch.zeros(1, 2, 16, requires_grad=trained))
    for form in (None, table):
        assert chosen(on_gpu(dtype, dims, form, trained)) == ("cuda", [])


DENSE = Dense(torch.zeros(1, 2, 16, 16))


@pytest.mark.parametrize(
    ("reason", "problem"),
    [
        ("has no float32; q may be bfloat16 or float16", on_gpu(torch.float32)),
        ("has no kernels for the form 'dense' of the bias", on_gpu(form=DENSE)),
        ("needs a head_dim that is a multiple of 8; q has 20", on_gpu(dims=(20, 64))),
        ("needs a head_dim that is a multiple of 8; v has 3", on_gpu(dims=(64, 3))),
    ],
)
def test_triton_handles_problems_that_cuda_refuses(other_gpu, reason, problem):
    assert chosen(problem) == ("triton", [])
    with pytest.raises(backends.RefusedError, match=f"^backend='cuda' {reason}"):
        backends.choose("cuda", problem)


@pytest.mark.parametrize(
    ("call", "able"),
    [
        (DECODING, "'cpu', 'triton' or 'reference'"),
        (CONTEXT_PARALLELISM, "'cpu' or 'triton'"),
    ],
)
def test_triton_handles_calls_that_cuda_does_not(other_gpu, call, able):
    assert chosen(on_gpu(), call) == ("triton", [])
    reason = f"^backend='cuda' does not compute {call}; it may be {able}$"
    with pytest.raises(backends.RefusedError, match=reason):
        backends.choose("cuda", on_gpu(), call)


def test_context_parallelism_does_not_fall_back_to_the_reference(other_gpu):
    with pytest.raises(backends.RefusedError, match=r"'triton' has no float64.*; backend='ref"):
        chosen(on_gpu(torch.float64), CONTEXT_PARALLELISM)


@pytest.mark.parametrize(("dims", "name"), [((257, 64), "q"), ((64, 512), "v")], ids=str)
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_kernels_for_gpus_refuse_wide_heads(other_gpu, backend, dims, name):
    reason = f"^backend='{backend}' needs a head_dim of at most 256; {name} has {max(dims)}"
    with pytest.raises(backends.RefusedError, match=reason):
        backends.choose(backend, on_gpu(dims=dims))


def test_other_gpus_do_not_use_the_cuda_kernels(other_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert chosen(on_gpu()) == ("triton", [])
    with pytest.raises(ValueError, match=r"^backend='cuda' needs a GPU of compute capability 9\.0"):
        backends.choose("cuda", on_gpu())


def test_without_a_compiler_the_cuda_kernels_are_refused(other_gpu, monkeypatch):
    monkeypatch.setattr(nvrtc, "missing", lambda: "NVRTC 11.8 is too old")
    assert chosen(on_gpu()) == ("triton", [])
    with pytest.raises(ValueError, match=r"^backend='cuda' is not available: NVRTC 11\.8 is"):
        backends.choose("cuda", on_gpu())


def test_float64_on_a_gpu_uses_the_reference_with_a_warning(other_gpu):
    name, (message,) = chosen(on_gpu(torch.float64))
    assert name == "reference"
    assert "O(N^2) memory: backend='cuda' has no float64" in message
    assert "backend='triton' has no float64" in message


def test_gpus_without_triton_use_the_reference_with_a_warning(other_gpu, monkeypatch):
    monkeypatch.setattr(backends.get("triton"), "missing", "no module named triton")
    name, (message,) = chosen(on_gpu(), DECODING)
    assert name == "reference"
    assert "backend='triton' is not available: no module named triton" in message


def test_refused_compilers_are_named(other_gpu, monkeypatch):
    monkeypatch.setattr(refusals, "REFUSALS", (WRONG,))
    reason = (
        "backend='triton' refuses Triton 3.7.0 on sm_90: it computes wrong gradients; "
        "install triton 3.7.1 or newer"
    )
    name, (message,) = chosen(on_gpu(), DECODING)
    assert name == "reference"
    assert message.endswith(reason)
    with pytest.raises(ValueError, match=f"^{reason}$"):
        backends.choose("triton", on_gpu())


def test_info_reports_a_refused_compiler(other_gpu, monkeypatch):
    monkeypatch.setattr(refusals, "REFUSALS", (WRONG,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    report = backends.get("triton").report()
    assert not report.available
    assert "install triton 3.7.1" in report.detail


@pytest.mark.parametrize(
    ("version", "architecture", "refused"),
    [
        ("3.5.9", "sm_90", False),
        ("3.6.0", "sm_90", True),
        ("3.6.0+rocm7.0", "sm_90", True),
        ("3.7.0", "sm_90", True),
        ("3.7.1", "sm_90", False),
        ("3.10.0", "sm_90", False),
        ("3.7.0", "sm_80", False),
    ],
)
def test_refusals_apply_to_their_releases_and_architectures(
    monkeypatch, version, architecture, refused
):
    monkeypatch.setattr(refusals, "REFUSALS", (WRONG,))
    assert bool(refusal(version, architecture)) == refused


@pytest.mark.parametrize(
    ("version", "architecture", "reason"),
    [
        ("3.5.1", "sm_90", "the wgmma"),
        ("3.7.0", "sm_90", "the wgmma"),
        ("3.7.1", "sm_90", "before waiting"),
        ("3.8.0", "sm_90", ""),
        ("3.5.1", "sm_100", "descriptors"),
        ("3.8.0", "sm_103", "the tcgen05.mma"),
        ("3.9.0", "sm_103", ""),
        ("3.5.1", "sm_89", ""),
        ("3.5.1", "sm_120", ""),
    ],
)
def test_releases_that_miscompile_are_refused(version, architecture, reason):
    message = refusal(version, architecture)
    assert bool(message) == bool(reason)
    assert reason in message


def test_releases_are_refused_where_tests_fail():
    """As listed in docs/backends.md."""
    lines = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip().splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert header[1:] == [*ARCHITECTURES]
    assert len(rows) >= 8
    for version, *outcomes in rows:
        for architecture, outcome in zip(ARCHITECTURES, outcomes, strict=True):
            refused = bool(refusal(version, architecture))
            assert (outcome == TOO_OLD) == (release(version) < release(OLDEST)), version
            assert outcome == TOO_OLD or refused == outcome.endswith("fail"), version


def test_the_oldest_release_of_triton_is_the_declared_one():
    declared = re.search(r'"triton>=([\d.]+)', (PAGE.parents[1] / "pyproject.toml").read_text())[1]
    assert OLDEST.startswith(f"{declared}.")
    assert re.search(rf"Triton {declared} or newer", (PAGE.parents[1] / "README.md").read_text())


def test_another_table_replaces_the_one_of_the_page():
    page = f"before\n{BEGIN}\n\n| a |\n\n{END}\nafter\n"
    assert written(page, "| a |\n") == page
    assert written(written(page, ""), "| a |\n") == page


def test_refusals_without_architectures_apply_to_all(monkeypatch):
    entry = Refusal("3.7.0", "3.7.0", "it computes wrong gradients", "install triton 3.7.1")
    monkeypatch.setattr(refusals, "REFUSALS", (entry,))
    assert refusal("3.7.0", "gfx942")


def test_refusals_cause_no_graph_break(other_gpu):
    @torch.compile(fullgraph=True, backend="eager")
    def add_unless_refused(x):
        return x if backends.get("triton").kernels.unsupported(torch.device("cuda", 0)) else x + 1

    assert torch.equal(add_unless_refused(torch.zeros(2)), torch.ones(2))
