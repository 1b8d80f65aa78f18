"""The CUDA backend as tests run it: on a Hopper GPU or, without a GPU, in the emulator."""

from __future__ import annotations

import functools

import pytest
import torch

from biased_flash_attn import backends
from biased_flash_attn.cuda_kernels import nvrtc
from biased_flash_attn.cuda_kernels.variants import WIDEST_WITH_VECTORS
from tests.support.biases import FreeFactors
from tests.support.cases import Case
from tests.support.problems import Problem, check_problem, drawn, evaluate, fused, outputs

EMULATED = not torch.cuda.is_available()


def unavailable() -> str:
    """The reason why no kernel can run, or an empty string: there is no compiler, or the GPU has
    another compute capability."""
    if EMULATED:
        return nvrtc.missing()
    report = backends.get("cuda").report()
    return "" if report.available else report.detail


# The marks of every test module that runs kernels.
MARKS = [
    pytest.mark.kernels,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
    pytest.mark.usefixtures("hopper"),
]
# The biases whose forms have kernels.
FORMS = (
    "none",
    "linear",
    "distance",
    "cumulative",
    "cumulative-gain",
    "log1p_square",
    "log1p_square-gain",
    "relative-rank3",
    "relative_last-rank16",
)


attend = functools.partial(fused, backend="cuda")


def check(problem: Case | Problem, attend=attend) -> dict[str, torch.Tensor]:
    """Checks o, lse and, where there are kernels for them, all gradients."""
    problem = drawn(problem) if isinstance(problem, Case) else problem
    evaluated = evaluate
    if isinstance(problem.bias, FreeFactors):  # Triton computes what is missing
        problem.bias.query_tables.requires_grad_(False)
        evaluated = evaluate if max(problem.case.dims) <= WIDEST_WITH_VECTORS else outputs
    return check_problem(problem, attend, evaluated)
