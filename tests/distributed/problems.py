"""Problems of support/problems.py that are divided among ranks."""

from __future__ import annotations

import traceback
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from biased_flash_attn import biases
from biased_flash_attn.distributed import context_parallel_attention, shard, unshard
from tests.support.biases import ContextBias, Dense, FreeFactors, Steps
from tests.support.problems import check_problem, evaluate


class Whole(torch.autograd.Function):
    """Concatenates the parts of all ranks; the gradient of each rank is that of its own part."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return unshard(x, 2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return shard(grad, 2)


def own_bias(bias):
    """The bias of this rank's tokens."""
    if isinstance(bias, ContextBias):
        return bias.module(shard(bias.x, 1))
    if isinstance(bias, Steps):
        gain = None if bias.gain is None else shard(bias.gain, 2)
        return biases.CumulativeBias(shard(bias.steps, 2), gain, bias.kernel)
    if isinstance(bias, Dense):
        return biases.DenseBias(shard(bias.tensor, bias.tensor.dim() - 2))
    if isinstance(bias, FreeFactors):
        bias = bias()
        factors = bias.query_factors
        return replace(bias, query_factors=None if factors is None else shard(factors, 2))
    return bias


def attend(problem, **options) -> tuple[Tensor, Tensor]:
    case = problem.case
    options = {"causal": case.causal, "window": case.window, "scale": case.scale} | options
    results = context_parallel_attention(
        *(shard(x, 2) for x in (problem.q, problem.k, problem.v)),
        own_bias(problem.bias),
        return_lse=True,
        **options,
    )
    return tuple(Whole.apply(x) for x in results)


def summed(problem, attend) -> dict[str, Tensor]:
    """Results, with gradients summed over ranks."""
    results = evaluate(problem, attend)
    for name, x in results.items():
        if name.startswith("gradient"):
            results[name] = x.contiguous()
            dist.all_reduce(results[name])
    return results


def caught(check, case, seed: str) -> str:
    """The error of a case, or an empty string. All ranks draw the same problem."""
    torch.manual_seed(int(seed) + sum(map(ord, str(case))))
    try:
        check(case)
    except AssertionError:
        return traceback.format_exc()
    return ""


def check_summed(problem, attend=attend) -> None:
    """One rank compares the results of all."""
    if dist.get_rank() == 0:
        check_problem(problem, attend, summed)
    else:
        summed(problem, attend)
