"""What every rank does in the tests of context parallelism. The truth is that of cases.py."""

from __future__ import annotations

import os
import signal
import traceback
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.distributed import (
    Traffic,
    context_parallel_attention,
    positions,
    shard,
    unshard,
)
from biased_flash_attn.distributed.ring import Ring
from biased_flash_attn.distributed.running_sums import running_sums
from cases import (
    FORMS,
    Case,
    OfHiddenStates,
    Steps,
    check_problem,
    drawn,
    evaluate,
    naive,
    pairwise,
)

SOME_SHIPPED = ["kerple_log", "sandwich", "t5-both", "cable", "kernelized_cable", "forget_gate"]
CASES = [
    Case(lengths=(row["n"], row["n"]), **{k: x for k, x in row.items() if k != "n"})
    for row in pairwise(
        bias=[*FORMS, *SOME_SHIPPED],
        dtype=[torch.float64, torch.float32, torch.bfloat16],
        n=[8, 48, 264],
        dims=[(16, 16), (3, 8)],
        heads=[(1, 1), (4, 2)],
        causal=[True, False],
        window=[None, 1, 7, 100],
        layout=["contiguous", "heads_inside"],
    )
]
# Biases that fall, over so many keys that tiles of others' keys are left out.
SKIPPED = [
    Case(bias, lengths=(1024, 1024), batch=1, heads=(2, 1), causal=causal)
    for bias in ("linear", "distance", "cumulative", "cumulative-gain", "log1p_square")
    for causal in (True, False)
]


class Whole(torch.autograd.Function):
    """What ranks have, in one; each rank goes on with the gradient of its own part."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return unshard(x, 2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return shard(grad, 2)


def own_bias(bias):
    """That of this rank's tokens."""
    if isinstance(bias, OfHiddenStates):
        return bias.module(shard(bias.x, 1))
    if isinstance(bias, Steps):
        gain = None if bias.gain is None else shard(bias.gain, 2)
        return biases.CumulativeBias(shard(bias.steps, 2), gain, bias.kernel)
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
    """Results, with what ranks have of gradients summed."""
    results = evaluate(problem, attend)
    for name, x in results.items():
        if name.startswith("gradient"):
            results[name] = x.contiguous()
            dist.all_reduce(results[name])
    return results


def caught(check, case, seed: str) -> str:
    """What is wrong with a case, or nothing; the same problem is drawn on all ranks."""
    torch.manual_seed(int(seed) + sum(map(ord, str(case))))
    try:
        check(case)
    except AssertionError:
        return traceback.format_exc()
    return ""


def check_summed(problem, attend=attend) -> None:
    """One rank compares what all have computed."""
    if dist.get_rank() == 0:
        check_problem(problem, attend, summed)
    else:
        summed(problem, attend)


def check_exact(case: Case) -> None:
    check_summed(drawn(case))


def falling(case: Case):
    """A problem of SKIPPED: biases that fall, so that far keys do not matter."""
    problem, (heads, _) = drawn(replace(case, bias="none")), case.heads
    if case.bias == "linear":
        problem.bias = biases.ALiBi(heads, exponent=1.5, trainable=True)
    elif case.bias == "distance":
        problem.bias = biases.DistanceBias.from_function(lambda d: -0.3 * d, heads)
    else:
        squared = case.bias == "log1p_square"
        steps = torch.rand(1, heads, case.lengths[0]) * (1e6 if squared else -1)
        gain = 1 + torch.rand_like(steps) if case.bias.endswith("gain") else None
        problem.bias = Steps(steps, gain, "log1p_square" if squared else None)
    return problem


def check_skipped(case: Case) -> None:
    """Below float32's roundings, but with fewer bytes than without skipping."""
    problem, traffic, whole = falling(case), Traffic(), Traffic()
    evaluate(problem, lambda problem: attend(problem, traffic=whole, tolerance=0.0))
    check_summed(problem, lambda problem: attend(problem, traffic=traffic))
    assert traffic.total < 0.75 * whole.total, (traffic, whole)


def check_tolerance(case: Case) -> None:
    """What is left out holds at most the tolerance."""
    problem, tolerance = falling(case).double(), 0.05
    with torch.no_grad():
        o, lse = attend(problem, tolerance=tolerance)
        exact = naive(problem)
    assert (exact[1] - lse).abs().max() <= tolerance
    assert (lse - exact[1]).max() <= 1e-9
    group = problem.q.shape[1] // problem.v.shape[1]
    span = (problem.v.amax(2) - problem.v.amin(2)).repeat_interleave(group, 1)
    assert ((o - exact[0]).abs() <= tolerance * span[:, :, None] + 1e-9).all()


def check_needle(case: Case) -> None:
    """An early key that makes up for its distance, for late queries, is fetched from elsewhere."""
    problem = falling(case)
    with torch.no_grad():
        lift = -1.2 * problem.dense()[..., -1, 100].min()
        along = torch.nn.functional.normalize(torch.randn(case.dims[0]), dim=0)
        problem.k[:, :, 100] = problem.q[:, :, -300:] = along * (lift / problem.scale).sqrt()
    check_summed(problem)


def check_infinity(case: Case) -> None:
    """An infinite value spoils what all queries get that see it, however far they are."""
    problem = falling(case)
    with torch.no_grad():
        problem.v[0, 0, 5, 1] = torch.inf
        o, _ = attend(problem)
    assert not o[0, :, 5:, 1].isfinite().any()
    assert o[0, :, :, 0].isfinite().all()


def cases_of(ranks: int) -> list[Case]:
    """Fewer where there are more ranks."""
    return CASES[:: ranks // 2]


def everything(seed: str) -> dict:
    """What a rank finds."""
    cases = cases_of(dist.get_world_size())
    found = {"exact": {str(case): caught(check_exact, case, seed) for case in cases}}
    of_two = (
        *(skipped, layouts, sums_of_large_steps, called_again),
        *(counted, autocast, with_fsdp),
    )
    more = {2: of_two, 4: (dropped, with_tensor_parallelism)}
    return found | {f.__name__: f(seed) for f in more[dist.get_world_size()]}


def skipped(seed: str) -> dict[str, list[str]]:
    causal = [case for case in SKIPPED if case.causal]
    return {
        "exact": [caught(check_skipped, case, seed) for case in SKIPPED],
        "tolerance": [caught(check_tolerance, case, seed) for case in SKIPPED],
        "needle": [caught(check_needle, case, seed) for case in causal],
        "infinity": [caught(check_infinity, case, seed) for case in causal],
    }


def lost(seed: str) -> str:
    """What rank 0 is told when rank 1 is killed between two calls."""
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


def lost_on_the_way(seed: str) -> str:
    """The same, where rank 1 is killed before it sends what it has agreed to send."""
    q, k, v = torch.randn(3, 1, 2, 64, 8)
    if dist.get_rank() == 1:
        Ring.begin = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    try:
        context_parallel_attention(q, k, v)
    except RuntimeError as error:
        return str(error)
    return ""


def layouts(seed: str) -> list[str]:
    """Which assertions fail, and the errors of calls that are wrong."""
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
    """Errors of sums before a step that is larger than their digits allow, and of gradients."""
    n = 8 * dist.get_world_size()
    steps, weights = torch.ones(2, 1, 1, n, dtype=torch.float64)
    steps[..., -1], weights[..., 0] = 1e17, 1e17
    own = shard(steps, 2).requires_grad_()
    sums = running_sums(own, Ring(None))
    (gradient,) = torch.autograd.grad(sums, own, shard(weights, 2))
    of_sums = unshard(sums, 2)[0, 0, :-1] - torch.arange(1, n)
    of_gradient = unshard(gradient, 2)[0, 0, 1:] - torch.arange(n - 1, 0, -1)
    return [x.abs().max().item() for x in (of_sums, of_gradient)]


def called_again(seed: str) -> dict:
    """What differs in compiled code and the second time, and the error of second derivatives."""
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
    """Bytes that all ranks send of keys, values, sums and gradients in one call."""
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
    """Whether results, and bytes, under autocast are those of inputs that are cast before."""
    torch.manual_seed(int(seed) + dist.get_rank())
    inputs, bias = torch.randn(3, 1, 2, 512, 16), biases.ALiBi(2, exponent=2.0)
    cast, autocast = Traffic(), Traffic()
    expected = context_parallel_attention(*inputs.bfloat16(), bias, traffic=cast)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = context_parallel_attention(*inputs, bias, traffic=autocast)
    return [torch.equal(o, expected), cast.sent == autocast.sent]


def dropped(seed: str) -> list[int]:
    """How many hops brought keys, and how many were dropped, where only neighbours matter."""
    torch.manual_seed(int(seed) + dist.get_rank())
    q, k, v = torch.randn(3, 1, 2, 256, 16)
    traffic = Traffic()
    context_parallel_attention(q, k, v, biases.ALiBi(2, exponent=0.0), traffic=traffic)
    return [traffic.hops, traffic.dropped_hops]


def with_fsdp(seed: str) -> list[float]:
    """The largest differences of parameters, after two steps, from those of one process."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.manual_seed(int(seed))
    states = torch.randn(2, 32, 16)
    alone, ours = Layers(), Layers()
    ours.load_state_dict(alone.state_dict())
    fully_shard(ours, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    for model, of_rank in ((alone, lambda x, dim: x), (ours, shard)):
        model.attend = biased_flash_attn if model is alone else context_parallel_attention
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(2):
            model(of_rank(states, 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    whole = (x.full_tensor() if isinstance(x, DTensor) else x for x in ours.parameters())
    return [
        (one - other).abs().max().item()
        for one, other in zip(alone.parameters(), whole, strict=True)
    ]


def with_tensor_parallelism(seed: str) -> list[float]:
    """The largest errors of this rank's part, on a mesh where each rank has some of the heads."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "heads"))
    group, n = mesh["context"].get_group(), mesh["heads"].get_local_rank()
    torch.manual_seed(int(seed))
    q, k, v = (torch.randn(2, heads, 48, 8).double() for heads in (6, 2, 2))
    cumulative = biases.CumulativeBias(torch.randn(2, 6, 48).double(), torch.rand(2, 6, 48))
    mine, of_kv, errors = slice(3 * n, 3 * n + 3), slice(n, n + 1), []
    for bias in (biases.ALiBi(6), biases.KerpleLog(6), cumulative):
        own = biases.of_heads(bias, mine.start, mine.stop)
        if bias is cumulative:
            own = replace(own, steps=shard(own.steps, 2, group), gain=shard(own.gain, 2, group))
        parts = (shard(x, 2, group) for x in (q[:, mine], k[:, of_kv], v[:, of_kv]))
        with torch.no_grad():
            expected = biased_flash_attn(q, k, v, bias)[:, mine]
            o = context_parallel_attention(*parts, own, group=group)
        errors.append((o - shard(expected, 2, group)).abs().max().item())
    return errors


class Layers(torch.nn.Module):
    """Attention with trained slopes, and with CABLE, whose gains come from hidden states."""

    def __init__(self):
        super().__init__()
        self.project = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(2))
        self.slopes, self.cable = biases.ALiBi(2, trainable=True), biases.Cable(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        for project, bias in zip(self.project, (self.slopes, self.cable), strict=True):
            q, k, v = project(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            o = self.attend(q, k, v, bias(x) if bias is self.cable else bias)
            x = x + o.transpose(1, 2).flatten(2)
        return x
