"""Which backend runs on a GPU that this machine need not have."""

from __future__ import annotations

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch
from biased_flash_attn.triton_kernels import refusals
from biased_flash_attn.triton_kernels.refusals import Refusal, refusal

from biased_flash_attn import backends

WRONG = Refusal(
    "3.6.0",
    "3.7.0",
    reason="it computes wrong gradients",
    remedy="install triton 3.7.1 or newer",
    architectures=frozenset({"sm_90"}),
)


@pytest.fixture
def other_gpu(monkeypatch):
    """Makes backends believe in a GPU that this machine need not have, and in its compiler."""
    triton = pytest.importorskip("triton")
    from biased_flash_attn.triton_kernels import processors

    gpu = processors.Processor("cuda", 90, 227 * 1024)
    monkeypatch.setattr(processors, "processor", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    monkeypatch.setattr(refusals, "REFUSALS", ())


def on_gpu(dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    """What a choice reads of q."""
    return SimpleNamespace(dtype=dtype, device=torch.device("cuda", 0))


def chosen(q, backend: str | None = None) -> tuple[str, list[str]]:
    """The backend, and the warnings of choosing it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = backends.choose(q, backend)
    return name, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_takes_the_triton_kernels(other_gpu, dtype):
    assert chosen(on_gpu(dtype)) == ("triton", [])


def test_float64_on_a_gpu_takes_the_reference_and_says_why(other_gpu):
    name, (message,) = chosen(on_gpu(torch.float64))
    assert name == "reference"
    assert "O(N^2) memory: backend='triton' has no float64" in message


def test_a_gpu_without_triton_takes_the_reference_and_says_why(monkeypatch):
    monkeypatch.setattr(backends.get("triton"), "missing", "no module named triton")
    name, (message,) = chosen(on_gpu())
    assert name == "reference"
    assert "backend='triton' is not available: no module named triton" in message


def test_a_refused_compiler_is_refused_by_name(other_gpu, monkeypatch):
    monkeypatch.setattr(refusals, "REFUSALS", (WRONG,))
    reason = (
        "backend='triton' refuses Triton 3.7.0 on sm_90: it computes wrong gradients; "
        "install triton 3.7.1 or newer"
    )
    name, (message,) = chosen(on_gpu())
    assert name == "reference"
    assert message.endswith(reason)
    with pytest.raises(ValueError, match=f"^{reason}$"):
        backends.choose(on_gpu(), "triton")


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
def test_a_refusal_holds_for_its_releases_and_architectures(
    monkeypatch, version, architecture, refused
):
    monkeypatch.setattr(refusals, "REFUSALS", (WRONG,))
    assert bool(refusal(version, architecture)) == refused


@pytest.mark.parametrize(
    ("version", "architecture", "refused"),
    [
        ("3.6.0", "sm_90", True),
        ("3.7.0", "sm_90", True),
        ("3.7.1", "sm_90", False),
        ("3.9.0", "sm_90", False),
        ("3.6.0", "sm_80", False),
    ],
)
def test_releases_without_fences_on_hopper_are_refused(version, architecture, refused):
    assert ("fence" in refusal(version, architecture)) == refused


def test_a_refusal_without_architectures_holds_for_all(monkeypatch):
    entry = Refusal("3.7.0", "3.7.0", "it computes wrong gradients", "install triton 3.7.1")
    monkeypatch.setattr(refusals, "REFUSALS", (entry,))
    assert refusal("3.7.0", "gfx942")


def test_compiled_code_asks_for_refusals_without_a_graph_break(other_gpu):
    @torch.compile(fullgraph=True, backend="eager")
    def add_unless_refused(x):
        return x if backends.get("triton").kernels.unsupported(torch.device("cuda", 0)) else x + 1

    assert torch.equal(add_unless_refused(torch.zeros(2)), torch.ones(2))
