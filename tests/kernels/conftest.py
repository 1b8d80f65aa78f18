"""The backends that have kernels; without a GPU those for GPUs are emulated."""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn.cuda_kernels.launch import Launcher
from tests.conftest import EXECUTED
from tests.emulator.cuda_backend import emulated
from tests.emulator.cuda_driver import EmulatedDriver
from tests.kernels.cuda.backend import unavailable


@pytest.fixture(scope="session")
def emulated_hopper(request):
    """Stands in for the driver; keeps what it has loaded."""
    driver = EmulatedDriver()
    yield Launcher(driver)
    request.config.stash[EXECUTED].update(cuda_launches=driver.launches)


@pytest.fixture
def hopper(request, seed):
    """backend="cuda" runs on the GPU, or on an emulated one with tensors on the CPU."""
    if torch.cuda.is_available():
        with torch.device("cuda"):
            yield
        return
    launcher = request.getfixturevalue("emulated_hopper")
    launcher.driver.seed = launcher.driver.approximation_seed = seed
    with emulated(launcher):
        yield


@pytest.fixture(
    params=[
        "cpu",
        pytest.param("triton", marks=pytest.mark.kernels),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.kernels,
                pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
            ],
        ),
    ]
)
def backend(request) -> str:
    """Each of them, for tests of what all kernels have to do."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs Triton")
        request.getfixturevalue("gpu")
    elif request.param == "cuda":
        if request.config.option.gpu != "sm_90":
            pytest.skip("its kernels are for sm_90")
        request.getfixturevalue("hopper")
    return request.param
