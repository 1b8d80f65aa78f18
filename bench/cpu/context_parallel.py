"""One rank of a forward and backward pass of context parallelism; rank 0 prints all bytes sent.

    torchrun --standalone --nproc-per-node 2 -m bench.cpu.context_parallel \\
        alibi float32 32768 None 0

The arguments are the bias, the dtype, N, the tolerance and the seed of the inputs. It prints, as
JSON, the bytes of each kind, summed over ranks.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from bench.common.layer import DIM, HEAD_DIM, HEADS
from biased_flash_attn import biases
from biased_flash_attn.distributed import Traffic, context_parallel_attention


def main(name: str, dtype: str, length: str, tolerance: str, seed: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(ranks * int(seed) + rank)
    shape, real = (1, HEADS, int(length) // ranks, HEAD_DIM), getattr(torch, dtype)
    q, k, v, grad_o = (torch.randn(shape, generator=generator).to(real) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bias = make_bias(name, int(seed), torch.randn(1, shape[2], DIM, generator=generator))

    traffic = Traffic()
    options = {"tolerance": None if tolerance == "None" else float(tolerance)}
    o = context_parallel_attention(*leaves, bias, traffic=traffic, **options)
    torch.autograd.grad(o, leaves, grad_o)
    sent = torch.tensor(list(traffic.sent.values()))
    dist.all_reduce(sent)
    if rank == 0:
        print(json.dumps(dict(zip(traffic.sent, sent.tolist(), strict=True))))
    dist.destroy_process_group()


def make_bias(name: str, seed: int, x: torch.Tensor):
    """The bias, the same on all ranks, computed from this rank's hidden states if necessary."""
    torch.manual_seed(seed)
    if name in biases.CONTEXT_BIASES:
        with torch.no_grad():
            return biases.CONTEXT_BIASES[name](DIM, HEADS)(x)
    return biases.DISTANCE_BIASES[name](HEADS)


if __name__ == "__main__":
    main(*sys.argv[1:])
