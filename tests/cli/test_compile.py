"""`compile`, with a compiler that takes no time."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from biased_flash_attn.cli import main
from biased_flash_attn.cuda_kernels import cache, compiler, nvrtc
from biased_flash_attn.cuda_kernels.variants import usual


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs `compile` with an empty cache."""
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "missing", lambda: "")
    monkeypatch.setattr(nvrtc, "version", lambda: (13, 0))
    monkeypatch.setattr(nvrtc, "compile_kernel", compile_kernel)
    return lambda *arguments: CliRunner().invoke(main, ["compile", *arguments])


def compile_kernel(source, expression, architecture):
    assert architecture == "sm_90a"
    return nvrtc.Kernel(expression, b"image")


@pytest.mark.parametrize("head_dims", [(), (40,), (64, 100)], ids=str)
def test_kernels_are_found_where_calls_look_for_them(invoke, head_dims):
    options = [word for x in head_dims for word in ("--head-dim", str(x))]
    expected = list(usual(*{(40,): [(64,)], (64, 100): [(64, 128)]}.get(head_dims, [])))
    result = invoke(*options)
    assert result.exit_code == 0, result.output
    assert f"{len(expected)} kernels are in {cache.folder()}; {len(expected)} of" in result.output
    for variant in expected:
        kernel = cache.load(compiler.key_of(variant, "sm_90a"))
        assert kernel == (variant.expression, b"image")
    assert "; 0 of them are new" in invoke(*options).output


def test_missing_packages_are_named(invoke, monkeypatch):
    monkeypatch.setattr(nvrtc, "missing", lambda: "cuda-bindings cannot be imported")
    result = invoke()
    assert result.exit_code == 1
    assert "cannot be compiled: cuda-bindings cannot be imported" in result.output


@pytest.mark.parametrize("failing", ["compiler", "disk"])
def test_failures_are_reported(invoke, monkeypatch, tmp_path, failing):
    def fails(*_):
        raise nvrtc.CompilationError("NVRTC cannot compile it")

    if failing == "compiler":
        monkeypatch.setattr(nvrtc, "compile_kernel", fails)
    else:
        (tmp_path / "cache").write_text("a file")
    result = invoke("--head-dim", "64")
    assert result.exit_code == 1
    expected = {"compiler": "Error: NVRTC cannot compile it", "disk": str(tmp_path / "cache")}
    assert expected[failing] in result.output
