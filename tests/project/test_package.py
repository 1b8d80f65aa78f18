"""The package as users install it: built, installed and run outside its source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from biased_flash_attn.cuda_kernels import nvrtc
from biased_flash_attn.extrapolation.published import PAPERS

ROOT = Path(__file__).parents[2]
NOT_SOURCES = shutil.ignore_patterns(
    ".*", "build", "*.egg-info", "__pycache__", "_C.*", "_build_error.txt"
)
# The packages in folders of the repository.
FOLDERS = {
    "python/biased_flash_attn": "biased_flash_attn",
    "triton_kernels": "biased_flash_attn/triton_kernels",
    "csrc/cuda": "biased_flash_attn/cuda_kernels/sources",
}

ATTENTION = """
import torch
from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn import triton_kernels
q, k, v = torch.randn(3, 1, 2, 9, 16, requires_grad=True)
bias = biases.KerpleLog(2)
o = biased_flash_attn(q, k, v, bias)
o.sum().backward()
assert bias.r1.grad.isfinite().all()
print(triton_kernels.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel that `make wheel` builds if there is a manylinux tag."""
    built = built_wheel(tmp_path_factory.mktemp("with_compiler"))
    if sys.platform != "linux":
        return built
    folder = tmp_path_factory.mktemp("repaired")
    repair = ["-m", "auditwheel", "repair", "--exclude", "libgomp.so.1", "--wheel-dir", folder]
    run(sys.executable, *repair, built, cwd=folder)
    (repaired,) = folder.glob("*.whl")
    return repaired


@pytest.fixture(scope="module")
def wheel_without_compiler(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("without_compiler")
    return built_wheel(folder, CXX=shutil.which("false"))


@pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is a dependency on Linux only")
def test_development_dependencies_compile_cuda_kernels():
    """Their tests would be skipped otherwise."""
    assert not nvrtc.missing()


@pytest.mark.slow
def test_wheel_contains_every_module(wheel):
    modules = set()
    for folder, package in FOLDERS.items():
        for module in (ROOT / folder).rglob("*.py"):
            modules.add(f"{package}/{module.relative_to(ROOT / folder).as_posix()}")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    assert sys.platform != "linux" or "-manylinux_" in wheel.name
    assert not any(".libs/" in name for name in names), "a second OpenMP"
    assert {name for name in names if name.endswith(".py")} == modules
    assert "biased_flash_attn/py.typed" in names
    published = "biased_flash_attn/extrapolation/published"
    tables = {f"{published}/{name}.json" for name in PAPERS}
    assert {name for name in names if name.endswith(".json")} == tables
    cuda, package = ROOT / "csrc" / "cuda", FOLDERS["csrc/cuda"]
    files = [x for x in cuda.rglob("*") if x.suffix in (".h", ".cuh", ".cu")]
    sources = {f"{package}/{x.relative_to(cuda).as_posix()}" for x in files}
    assert f"{package}/forms/linear.cuh" in sources
    assert {name for name in names if name.startswith(package)} - modules == sources


@pytest.mark.slow
def test_wheel_runs_in_an_empty_environment(wheel, tmp_path):
    python = environment_with(wheel, tmp_path)
    module = run(python, "-W", "error", "-c", ATTENTION, cwd=tmp_path).strip()
    assert Path(module).is_relative_to(tmp_path)
    info = run(python, "-m", "biased_flash_attn", "info", cwd=tmp_path)
    assert "portable" in info


@pytest.mark.slow
def test_wheel_without_compiler_warns_and_runs(wheel_without_compiler, tmp_path):
    assert wheel_without_compiler.name.endswith("-py3-none-any.whl")
    python = environment_with(wheel_without_compiler, tmp_path)
    run(python, "-W", "ignore", "-c", ATTENTION, cwd=tmp_path)
    with pytest.raises(AssertionError, match="UserWarning"):
        run(python, "-W", "error", "-c", ATTENTION, cwd=tmp_path)
    info = run(python, "-m", "biased_flash_attn", "info", cwd=tmp_path)
    assert shutil.which("false") in info


def test_only_declared_dependencies_are_required(tmp_path):
    names = ["matplotlib", "plotly", "scipy", "triton"]
    missing = f"import sys; sys.modules.update(dict.fromkeys({names}))"
    modules = "biased_flash_attn.cli, biased_flash_attn.compat, biased_flash_attn.extrapolation"
    script = f"{missing}; import {modules}; biased_flash_attn.cli.main(['info'])"
    assert "portable" in run(sys.executable, "-c", script, cwd=tmp_path)


def test_import_leaves_out_the_compiler_of_torch(tmp_path):
    """It takes as long to import as PyTorch itself."""
    script = "import sys, biased_flash_attn; print('torch._dynamo' in sys.modules)"
    assert run(sys.executable, "-c", script, cwd=tmp_path).strip() == "False"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kernels_and_torch_share_one_openmp(tmp_path):
    script = f"{ATTENTION}\nprint(open('/proc/self/maps').read())"
    mapped = run(sys.executable, "-c", script, cwd=tmp_path).splitlines()
    assert len({line.split()[-1] for line in mapped if "gomp" in line}) == 1


def built_wheel(folder: Path, **environment: str) -> Path:
    """A wheel from a copy of the sources, built as pip does by default."""
    sources = folder / "sources"
    shutil.copytree(ROOT, sources, ignore=NOT_SOURCES)
    # Optimization takes most of the build time, and is not needed here.
    environment = {"CMAKE_BUILD_TYPE": "Debug"} | environment
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", sources, cwd=folder, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment_with(wheel: Path, folder: Path) -> Path:
    """The interpreter of a new environment with the wheel, which borrows its dependencies."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-deps", wheel, cwd=folder)
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = run(python, "-c", purelib, cwd=folder).strip()
    # A .pth file adds a folder to the search path, but .pth files inside it, as of an editable
    # install, are not read.
    Path(packages, "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return python


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """The output of a command, which must succeed."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
