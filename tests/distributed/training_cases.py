"""Context parallelism combined with tensor parallelism and FSDP."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.distributed import context_parallel_attention, shard


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
