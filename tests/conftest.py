"""Every test draws its inputs from a fresh seed, and no test can pass by reading unset memory."""

from __future__ import annotations

import os
import random
import secrets
import zlib

# Waiting threads that spin starve the ones they wait for where other processes need the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch

# Read when kernels are defined, so before anything imports them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# `with torch.device(...)` notes which functions it sends elsewhere when it is first used. They have
# to be torch's own, before `poisoned_empty` replaces them.
with torch.device("cpu"):
    torch.zeros(0)

hypothesis.settings.register_profile("quiet", deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("quiet")


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, help="draw the inputs of an earlier run again")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    if config.option.seed is None:
        config.option.seed = secrets.randbelow(2**32)
    config.option.hypothesis_seed = str(config.option.seed)


def pytest_report_header(config):
    return f"inputs: --seed={config.option.seed}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("inputs", f"drawn by --seed={item.config.option.seed}"))
    return report


@pytest.fixture(autouse=True)
def seed(request) -> int:
    """The seed of this test: the same for one --seed, whichever other tests run."""
    value = zlib.crc32(f"{request.config.option.seed} {request.node.nodeid}".encode())
    torch.manual_seed(value)
    random.seed(value)
    return value


MAKERS = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
]


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """Fills what torch leaves unset with NaN, which a result that reads it then shows."""
    for owner, name in MAKERS:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def poisoned(make):
    def make_poisoned(*args, **kwargs):
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.fill_(torch.nan)
        return tensor

    return make_poisoned


@pytest.fixture
def on_the_device_of_triton():
    """Everything is made where the Triton kernels run."""
    from triton_backend import INTERPRETED

    with torch.device("cpu" if INTERPRETED else "cuda"):
        yield


@pytest.fixture(scope="module")
def quick_and_strict_interpreter():
    """Where kernels are interpreted, sooner, and within the memory of their tensors."""
    from triton_backend import INTERPRETED, KERNELS

    if not INTERPRETED or KERNELS is None or os.environ['TRITON_INTERPRET'] == '0':
        yield
        return
    from interpreter import check_memory, prepare_once

    with pytest.MonkeyPatch.context() as patch:
        prepare_once(patch, KERNELS.__package__)
        check_memory(patch)
        yield
