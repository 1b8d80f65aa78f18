"""Every test draws its inputs from its own seed, and no test can pass by reading unset memory."""

from __future__ import annotations

import argparse
import os
import random
import zlib
from collections import Counter

# Waiting threads that spin starve the ones they wait for where other processes need the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# On machines with any number of cores, as sums depend on how they are divided among threads. Two
# are enough for whatever is divided, and processes that tests start have them too.
os.environ["OMP_NUM_THREADS"] = "2"

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis.internal.conjecture import providers

from tests.support import kernel_sample

# `with torch.device(...)` notes which functions it sends elsewhere when it is first used. They have
# to be torch's own, before `poisoned_empty` replaces them.
with torch.device("cpu"):
    torch.zeros(0)

COVERING = "covering"
THREADS = int(os.environ["OMP_NUM_THREADS"])

# Nothing that depends on time: no deadline, and no complaint about slow inputs.
hypothesis.settings.register_profile(
    "default",
    derandomize=True,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")
# Hypothesis would also draw constants of modules that other tests may have imported.
providers.is_local_module_file = lambda path: False


def number_of_tests(text: str) -> int | str:
    if text == COVERING:
        return text
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"it is a number of tests or {COVERING!r}, not {text!r}")


def pytest_addoption(parser):
    parser.addoption("--seed", type=int, default=0, help="draw other inputs than those of seed 0")
    parser.addoption(
        "--gpu",
        choices=["sm_80", "sm_90", "sm_100", "sm_120"],
        default="sm_90",
        help="the architecture that Triton kernels are compiled for and emulated as, without a GPU",
    )
    parser.addoption(
        "--kernel-tests",
        type=number_of_tests,
        metavar=f"N or {COVERING}",
        help="run N tests of GPU kernels, of as many functions as possible, or few that cover "
        "every form of bias in every dtype, and not all of them",
    )
    parser.addoption(
        "--kernel-pairs",
        action="store_true",
        help="compile GPU kernels with every pair of settings, not only with every setting",
    )


def pytest_report_header(config):
    return f"inputs: --seed={config.option.seed}"


def pytest_collection_modifyitems(config, items):
    n = config.option.kernel_tests
    if n is None:
        return
    kernel_items = [item for item in items if item.get_closest_marker("kernels")]
    chosen = kernel_sample.sample(kernel_items, most=None if n == COVERING else n)
    deselected = set(kernel_items).difference(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item in deselected])
    items[:] = [item for item in items if item not in deselected]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("inputs", f"drawn by --seed={item.config.option.seed}"))
    return report


def seed_generators(name: str) -> int:
    value = zlib.crc32(name.encode())
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)
    return value


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector):
    """What a file draws when it is imported depends on no other file."""
    seed_generators(collector.nodeid)


@pytest.fixture(autouse=True)
def seed(request) -> int:
    """The seed of this test: the same for one --seed, whichever other tests run."""
    value = seed_generators(f"{request.config.option.seed} {request.node.nodeid}")
    if hypothesis.is_hypothesis_test(request.function):
        hypothesis.seed(value)(request.function)
    return value


@pytest.fixture(autouse=True)
def number_of_threads():
    """That which a test sets is not left to the next."""
    yield
    torch.set_num_threads(THREADS)


MAKERS = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
]


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """Fills what torch leaves unset with NaN, which a result that reads it then shows. Bytes also
    are NaN as numbers of any other dtype."""
    for owner, name in MAKERS:
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def poisoned(make):
    def make_poisoned(*args, **kwargs):
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point():
            with torch.no_grad():
                tensor.fill_(torch.nan)
        elif tensor.dtype == torch.uint8:
            tensor.fill_(0xFF)
        return tensor

    return make_poisoned


EXECUTED = pytest.StashKey[Counter]()
DESELECTED = pytest.StashKey[int]()


def pytest_configure(config):
    config.stash[EXECUTED] = Counter()
    config.stash[DESELECTED] = 0


def pytest_deselected(items):
    if items:
        items[0].config.stash[DESELECTED] += len(items)


def pytest_sessionfinish(session):
    """A process that runs some of the tests reports its counts to the one that started it."""
    if hasattr(session.config, "workeroutput"):
        stash = session.config.stash
        counts = {"executed": dict(stash[EXECUTED]), "deselected": stash[DESELECTED]}
        session.config.workeroutput |= counts


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    if output := getattr(node, "workeroutput", {}):
        node.config.stash[EXECUTED].update(output["executed"])
        node.config.stash[DESELECTED] = output["deselected"]  # the same in each process


def pytest_terminal_summary(terminalreporter, config):
    if executed := config.stash[EXECUTED]:
        counts = ", ".join(f"{n:,} {what}" for what, n in executed.items())
        terminalreporter.write_line(f"emulated {config.option.gpu}: {counts}")
    if deselected := config.stash[DESELECTED]:
        terminalreporter.write_line(f"tests not selected: {deselected:,}")


@pytest.fixture(scope="session")
def emulated_gpu(request):
    """Stands in for a GPU; keeps what was compiled for it."""
    from tests.emulator.triton_device import Device

    device = Device(int(request.config.option.gpu.removeprefix("sm_")))
    yield device
    request.config.stash[EXECUTED].update(
        kernels=len(device.executed),
        launches=sum(device.launches.values()),
        instructions=device.instructions,
    )


@pytest.fixture
def drawn_dtype(request) -> torch.dtype:
    """One of those that GPU kernels take, the same for all tests of a bias."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    bias, backend = parameters.get("bias", ""), parameters.get("backend")
    dtype = kernel_sample.drawn_dtype(bias, request.config.option.seed, backend)
    print(dtype)
    return dtype


@pytest.fixture
def gpu(request, seed):
    """Everything is made on the GPU, or on the CPU for an emulated one."""
    if torch.cuda.is_available():
        with torch.device("cuda"):
            yield
        return
    from tests.emulator.triton_backend import emulated

    device = request.getfixturevalue("emulated_gpu")
    device.seed = device.approximation_seed = seed
    with emulated(device):
        yield


@pytest.fixture(params=["cpu", "reference", pytest.param("triton", marks=pytest.mark.kernels)])
def backend(request) -> str:
    """Each of them, for tests of what all have to do."""
    if request.param == "triton":
        pytest.importorskip("triton", reason="needs Triton")
        request.getfixturevalue("gpu")
    return request.param
