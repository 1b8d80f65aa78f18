"""Which backend runs on a GPU that this machine need not have."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from biased_flash_attn import backends
from biased_flash_attn.triton_kernels import refusals
from biased_flash_attn.triton_kernels.refusals import Refusal, refusal

WRONG = Refusal(
    "3.6.0",
    "3.7.0",
    reason="it computes wrong gradients",
    remedy="install triton 3.7.1 or newer",
    architectures=frozenset({"sm_90"}),
)


@pytest.fixture
def gpu(monkeypatch):
    """Makes backends believe in a GPU with compiled kernels: gpu(major, minor, version)."""
    triton = pytest.importorskip("triton")

    def make(major: int = 9, minor: int = 0, version: str = "3.7.0") -> None:
        properties = SimpleNamespace(major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(backends, "_TRITON_KERNELS", SimpleNamespace(DEVICE_TYPE="cuda"))
        monkeypatch.setattr(triton, "__version__", version)

    return make


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
def test_a_gpu_takes_the_triton_kernels(gpu, dtype):
    gpu()
    assert chosen(on_gpu(dtype)) == ("triton", [])


def test_float64_on_a_gpu_takes_the_reference_and_says_why(gpu):
    gpu()
    name, (message,) = chosen(on_gpu(torch.float64))
    assert name == "reference"
    assert "O(N^2) memory: backend='triton' has no float64" in message


def test_a_gpu_without_triton_takes_the_reference_and_says_why(monkeypatch):
    monkeypatch.setattr(backends, "_TRITON_KERNELS", None)
    monkeypatch.setattr(backends, "_TRITON_KERNELS_MISSING", "no module named triton")
    name, (message,) = chosen(on_gpu())
    assert name == "reference"
    assert "backend='triton' is not available: no module named triton" in message


def test_a_refused_compiler_is_refused_by_name(gpu, monkeypatch):
    gpu()
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


def test_info_reports_a_refused_compiler(gpu, monkeypatch):
    gpu()
    monkeypatch.setattr(refusals, "REFUSALS", (WRONG,))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    report = backends.report()[0]
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


def test_a_refusal_without_architectures_holds_for_all(monkeypatch):
    entry = Refusal("3.7.0", "3.7.0", "it computes wrong gradients", "install triton 3.7.1")
    monkeypatch.setattr(refusals, "REFUSALS", (entry,))
    assert refusal("3.7.0", "gfx942")


def test_an_amd_gpu_is_named_by_its_architecture(monkeypatch):
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", major=9, minor=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert backends.architecture(0) == "gfx942"


def test_compiled_code_asks_for_refusals_without_a_graph_break(gpu):
    gpu()

    @torch.compile(fullgraph=True, backend="eager")
    def add_unless_refused(x):
        return x if backends._refusal_of_compiler(0) else x + 1

    assert torch.equal(add_unless_refused(torch.zeros(2)), torch.ones(2))
