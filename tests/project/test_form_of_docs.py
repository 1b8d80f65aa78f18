"""The form in docs/extending.md needs two files, and their registration, for the CPU kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "extending.md").read_text()
COMPARE = """
import torch
from torch import nn

from biased_flash_attn import biased_flash_attn
from biased_flash_attn.forms import Halving


class Bonus(nn.Module):
    def __init__(self):
        super().__init__()
        self.bonus = nn.Parameter(torch.tensor([[0.5, 2.0]]))

    def lower(self, geometry, dtype, device):
        return Halving(self.bonus.to(dtype))


def results(backend, causal, bias):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8).double().requires_grad_() for n in (130, 150, 150))
    o = biased_flash_attn(q, k, v, bias, causal=causal, backend=backend)
    return o, *torch.autograd.grad(o.square().sum(), (q, k, v, *bias.parameters()))


for causal in (True, False):
    for ours, exact in zip(results("cpu", causal, Bonus()), results("reference", causal, Bonus())):
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-9)
"""


def block(language: str) -> str:
    return re.search(rf"```{language} title=.*?\n(.*?)```", GUIDE, re.DOTALL).group(1)


def run(*command: str | Path, **environment: str) -> None:
    done = subprocess.run(
        list(map(str, command)), env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_form_of_docs(tmp_path):
    for folder in ("csrc", "python"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("_C.*"))
    shutil.copy(ROOT / "CMakeLists.txt", tmp_path)
    package, listed = tmp_path / "python" / "biased_flash_attn", tmp_path / "csrc/cpu/forms/list.h"
    (package / "forms" / "halving.py").write_text(block("python"))
    (tmp_path / "csrc/cpu/forms/halving.h").write_text(block("cpp"))
    with (package / "forms" / "__init__.py").open("a") as file:
        file.write("from .halving import Halving as Halving\n")
    header = listed.read_text()
    header = header.replace('#include "linear.h"', '#include "halving.h"\n#include "linear.h"')
    listed.write_text(header.replace("FormList<None,", "FormList<None, Halving,"))

    build = tmp_path / "build"
    # The portable kernels alone, and not optimized, are built in a fifth of the time.
    options = ("-DCOMPILER_HAS_X86=OFF", "-DCMAKE_BUILD_TYPE=Debug")
    run("cmake", "-G", "Ninja", "-S", tmp_path, "-B", build, *options)
    run("cmake", "--build", build)
    run("cmake", "--install", build, "--prefix", package)
    run(sys.executable, "-c", COMPARE, PYTHONPATH=str(package.parent))
