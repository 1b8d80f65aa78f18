"""A Hopper GPU, real or emulated, and faults that are planted in its kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from biased_flash_attn.cuda_kernels import cache, nvrtc
from biased_flash_attn.cuda_kernels.launch import Launcher
from tests.emulator import Fault
from tests.emulator.cuda_backend import emulated
from tests.emulator.cuda_driver import EmulatedDriver
from tests.kernels.cuda.planted import WRONG, Planted

RUNS = 20  # with different interleavings, until a planted fault is found


@pytest.fixture
def first_fault(seed, monkeypatch, tmp_path):
    """Returns a function from a fault and a check to the kind of the fault in the first
    interleaving in which one occurs, or ""."""

    def found(planted: Planted, run: Callable[[], object]) -> str:
        texts = dict(nvrtc.texts())
        assert planted.old in texts[planted.source]
        texts[planted.source] = texts[planted.source].replace(planted.old, planted.new)
        monkeypatch.setattr(nvrtc, "texts", lambda: texts)
        monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path))
        driver = EmulatedDriver()
        with emulated(Launcher(driver)):
            for driver.seed in range(seed, seed + RUNS):
                try:
                    run()
                except Fault as fault:
                    return fault.kind
                except AssertionError:
                    return WRONG
        return ""

    return found
