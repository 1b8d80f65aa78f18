"""The functions that each rank executes in the tests of context parallelism."""

from __future__ import annotations

import os
import signal
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from biased_flash_attn import biases
from biased_flash_attn.distributed import (
    Traffic,
    context_parallel_attention,
    positions,
    shard,
    unshard,
)
from biased_flash_attn.distributed.prefix_sums import exclusive_chunk_sums
from biased_flash_attn.distributed.ring import Ring
from tests.distributed.pairs_of_settings import cases_of
from tests.distributed.problems import attend, caught, check_summed, own_bias
from tests.distributed.skipping_cases import skipped
from tests.distributed.training_cases import with_fsdp, with_tensor_parallelism
from tests.support.biases import FORMS, Lowered
from tests.support.cases import Case
from tests.support.problems import drawn


def check_exact(case: Case) -> None:
    check_summed(drawn(case), partial(attend, tolerance=0.0))


def everything(seed: str) -> dict:
    """The results of a rank."""
    cases = cases_of(dist.get_world_size())
    found = {"exact": {str(case): caught(check_exact, case, seed) for case in cases}}
    of_two = (
        *(skipped, layouts, sums_of_large_steps, repeated_calls),
        *(counted, autocast, with_fsdp, custom_biases, weights_of_a_large_bias),
    )
    more = {2: of_two, 4: (dropped, with_tensor_parallelism)}
    return found | {f.__name__: f(seed) for f in more[dist.get_world_size()]}


def custom_biases(seed: str) -> list[str]:
    """The forms whose results differ for a custom bias."""
    torch.manual_seed(int(seed))
    different = []
    for form in FORMS:
        problem = drawn(Case(form, lengths=(64, 64), heads=(2, 1), window=40))
        bias = own_bias(problem.bias)
        qkv = [shard(x, 2).detach() for x in (problem.q, problem.k, problem.v)]
        exact = context_parallel_attention(*qkv, bias)
        if not torch.equal(context_parallel_attention(*qkv, bias and Lowered(bias)), exact):
            different.append(form)
    return different


def lost(seed: str) -> str:
    """The error on rank 0 after rank 1 is killed between two calls."""
    q, k, v = torch.randn(3, 1, 2, 64, 8)
    context_parallel_attention(q, k, v)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(10):
            context_parallel_attention(q, k, v)
    except RuntimeError as error:
        return str(error)
    return ""


def lost_in_transfer(seed: str) -> str:
    """The error on rank 0 if rank 1 is killed after the agreement on messages, before sending."""
    q, k, v = torch.randn(3, 1, 2, 64, 8)
    if dist.get_rank() == 1:
        Ring.begin = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    try:
        context_parallel_attention(q, k, v)
    except RuntimeError as error:
        return str(error)
    return ""


def layouts(seed: str) -> list[str]:
    """Failed assertions, and the errors of invalid calls."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(int(seed))
    x = torch.randn(3, 8 * ranks, 2)
    part = shard(x, 1)
    assert torch.equal(part, x[:, positions(8)])
    assert torch.equal(unshard(part, 1), x)
    assert torch.equal(unshard(positions(6), 0), torch.arange(6 * ranks))
    q, k, v = torch.randn(3, 1, 2, 8, 4)
    steps = biases.CumulativeBias(torch.randn(1, 2, 8 * ranks))
    calls = [
        lambda: shard(x, 2),
        lambda: context_parallel_attention(q[:, :, :7], k[:, :, :7], v[:, :, :7]),
        lambda: context_parallel_attention(q, k, v, backend="reference"),
        lambda: context_parallel_attention(q, k, v, traffic=3),
        lambda: context_parallel_attention(q, k, v, scale=1.0 + rank),
        lambda: context_parallel_attention(q, k, v, steps),
        lambda: context_parallel_attention(q, k, v, biases.ALiBi(2) if rank else None),
        lambda: context_parallel_attention(q, k, v, biases.ALiBi(2) if rank else biases.Type2(2)),
        lambda: context_parallel_attention(q, k, v, group=init_device_mesh("cpu", (ranks,))),
        lambda: positions(7),
        lambda: unshard(x[0, :3], 0),
    ]
    return [error_of(call) for call in calls]


def error_of(call) -> str:
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sums_of_large_steps(seed: str) -> list[float]:
    """Errors of sums before a step that would absorb them, and of gradients."""
    n = 8 * dist.get_world_size()
    steps, weights = torch.ones(2, 1, 1, n, dtype=torch.float64)
    steps[..., -1], weights[..., 0] = 1e17, 1e17
    own = shard(steps, 2).requires_grad_()
    within = own.unflatten(-1, (2, -1)).cumsum(-1).flatten(-2)
    sums = within + exclusive_chunk_sums(within, Ring(None))
    (gradient,) = torch.autograd.grad(sums, own, shard(weights, 2))
    of_sums = unshard(sums, 2)[0, 0, :-1] - torch.arange(1, n)
    of_gradient = unshard(gradient, 2)[0, 0, 1:] - torch.arange(n - 1, 0, -1)
    return [x.abs().max().item() for x in (of_sums, of_gradient)]


def weights_of_a_large_bias(seed: str) -> float:
    """The error of the sum of a query's weights in the backward pass, on average."""
    torch.manual_seed(int(seed))
    q, k, v = (shard(x, 2).requires_grad_() for x in torch.randn(3, 1, 2, 64, 8))
    bias = biases.DistanceBias.from_function(lambda d: 0 * d - 1e30, 2)
    o = context_parallel_attention(q, k, v, bias)
    (grad_v,) = torch.autograd.grad(o.sum(), v)
    return (unshard(grad_v, 2).double().mean(2) - 1).abs().max().item()


def repeated_calls(seed: str) -> dict:
    """Differences in compiled code and in a second call, and the error of second derivatives."""
    torch.manual_seed(int(seed))
    bias = biases.ALiBi(2)
    q, k, v = torch.randn(3, 1, 2, 64, 8).requires_grad_()
    o = context_parallel_attention(q, k, v, bias)
    compiled = torch.compile(
        lambda q, k, v: 2 * context_parallel_attention(q, k, v, bias), backend="eager"
    )
    (first,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    (again,) = torch.autograd.grad(o.sum(), q, retain_graph=True)
    try:
        first.square().sum().backward()
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    differences = [(compiled(q, k, v) - 2 * o), first - again]
    return {"differences": [x.abs().max().item() for x in differences], "error": error}


def counted(seed: str) -> list[int]:
    """The bytes of keys, values, sums and gradients that all ranks send in one call."""
    traffic, n = Traffic(), 64
    q, k, v = (torch.randn(1, heads, n, 4).requires_grad_() for heads in (4, 2, 2))
    steps = torch.randn(1, 4, n, requires_grad=True)
    bias = biases.CumulativeBias(steps)
    o = context_parallel_attention(q, k, v, bias, tolerance=0.0, traffic=traffic)
    o.sum().backward()
    sent = torch.tensor([traffic.sent[kind] for kind in ("keys", "values", "sums", "gradients")])
    dist.all_reduce(sent)
    assert (traffic.hops, traffic.dropped_hops) == (2 * (dist.get_world_size() - 1), 0)
    return sent.tolist()


def autocast(seed: str) -> list[bool]:
    """Whether results and traffic under autocast equal those of inputs cast in advance."""
    torch.manual_seed(int(seed) + dist.get_rank())
    inputs, bias = torch.randn(3, 1, 2, 512, 16), biases.ALiBi(2, exponent=2.0)
    cast, autocast = Traffic(), Traffic()
    expected = context_parallel_attention(*inputs.bfloat16(), bias, traffic=cast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = context_parallel_attention(*inputs, bias, traffic=autocast)
    return [torch.equal(o, expected), cast.sent == autocast.sent]


def dropped(seed: str) -> list[int]:
    """The numbers of hops with keys and of omitted hops, if only neighbours have weight."""
    torch.manual_seed(int(seed) + dist.get_rank())
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    traffic = Traffic()
    context_parallel_attention(q, k, v, biases.ALiBi(2, exponent=0.0), traffic=traffic)
    return [traffic.hops, traffic.dropped_hops]
