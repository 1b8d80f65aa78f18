"""Results depend on the number of threads only by rounding, and never on their scheduling."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.biases import FORMS
from tests.support.cases import Case
from tests.support.problems import check_problem, drawn, evaluate

# Enough work for several threads; with fewer heads than threads, backward splits a head's keys.
HEADS = {"many": {"batch": 2, "heads": (4, 2)}, "one": {"batch": 1, "heads": (1, 1)}}


@pytest.mark.parametrize("bias", FORMS)
@pytest.mark.parametrize("heads", HEADS)
def test_results_are_repeatable(bias, heads):
    problem = drawn(Case(bias, lengths=(500, 500), dims=(32, 32), **HEADS[heads]))
    torch.set_num_threads(5)
    first = evaluate(problem)
    for _ in range(3):
        for name, x in evaluate(problem).items():
            assert torch.equal(x, first[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", FORMS)
@pytest.mark.parametrize("heads", HEADS)
def test_results_are_exact_on_any_number_of_threads(bias, heads, dtype):
    case = Case(bias, dtype, lengths=(330, 330), dims=(32, 32), **HEADS[heads])
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        check_problem(drawn(case))


def test_outputs_are_the_same_on_any_number_of_threads():
    problem = drawn(Case("distance", lengths=(500, 500), dims=(32, 32)))
    torch.set_num_threads(1)
    alone = evaluate(problem)
    torch.set_num_threads(5)
    together = evaluate(problem)
    for name in ("o", "lse"):
        assert torch.equal(alone[name], together[name]), name


def test_concurrent_calls_do_not_share_memory():
    problems = [drawn(Case(bias, lengths=(300, 300), dims=(32, 32))) for bias in FORMS]
    with ThreadPoolExecutor(len(problems)) as pool:
        for _ in pool.map(check_problem, problems):
            pass


@pytest.mark.parametrize("bias", FORMS)
def test_earlier_calls_do_not_affect_results(bias):
    problem = drawn(Case(bias, lengths=(130, 130), dims=(40, 40)))
    first = evaluate(problem)
    for lengths in ((130, 130), (700, 700)):
        poison = drawn(Case(bias, lengths=lengths, dims=(40, 40)))
        for x in (poison.q, poison.k, poison.v):
            x.detach().fill_(torch.nan)
        evaluate(poison)
        for name, x in evaluate(problem).items():
            assert torch.equal(x, first[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flushing_of_subnormals_is_restored_after_a_call(dtype):
    evaluate(drawn(Case("linear", dtype, lengths=(130, 130))))
    smallest_normal = torch.full((100,), torch.finfo(torch.float32).tiny)
    assert (smallest_normal / 2 > 0).all()


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("count", [1, 3])
def test_torch_sets_the_number_of_threads(count):
    script = (
        "import os, torch\n"
        "from biased_flash_attn import biased_flash_attn\n"
        "torch.set_num_threads(1)\n"
        "q = torch.ones(1, 4, 500, 32)\n"
        f"torch.set_num_threads({count})\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "biased_flash_attn(q, q, q, backend='cpu')\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    started = subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.PIPE)
    assert int(started.stdout) == count - 1
