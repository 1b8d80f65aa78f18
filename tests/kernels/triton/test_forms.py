"""The device functions of forms, which are arguments of kernels."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import torch

from .backend import EMULATED, KERNELS, MARKS

triton = pytest.importorskip("triton", reason="needs Triton")
tl = pytest.importorskip("triton.language", reason="needs Triton")
operands = pytest.importorskip("biased_flash_attn.triton_kernels.operands", reason="needs Triton")

pytestmark = MARKS

SOURCE = """
import triton

@triton.jit
def tile_bias():
    return {value}
"""


@triton.jit
def store_bias(x, form):
    tl.store(x, form.tile_bias())


def form_of(folder: Path, value: float):
    """Functions whose modules and names do not depend on the value."""
    folder.mkdir()
    path = folder / "form.py"
    path.write_text(SOURCE.format(value=value))
    loader = SourceFileLoader("form", str(path))
    module = module_from_spec(spec_from_loader("form", loader))
    loader.exec_module(module)
    return operands.FormFunctions(tile_bias=module.tile_bias)


def test_kernels_are_compiled_again_when_a_function_of_their_form_changes(tmp_path):
    x = torch.zeros(1, device="cpu" if EMULATED else "cuda")
    hashes = set()
    for value in (1.0, 2.0):
        compiled = store_bias[(1,)](
            x, form_of(tmp_path / str(value), value), **KERNELS.options.OPTIONS
        )
        hashes.add(compiled.hash)  # the key of the cache on disk
        assert x.item() == value
    assert len(hashes) == 2
