"""Context-parallel attention on two processes, compared with a single process.

    python examples/context_parallel.py
    torchrun --nproc-per-node 4 examples/context_parallel.py

Every rank holds its part of q, k and v, and attends forward and backward. Rank 0 then repeats the
computation alone, compares the results, and prints the bytes that all ranks have sent with and
without certified skipping.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun

from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.distributed import Traffic, context_parallel_attention, shard, unshard

HEADS, LENGTH, DIM = 8, 8192, 64


def attend_in_parts(q, k, v, grad_o, bias, tolerance):
    """o and the gradients of q, k and v, gathered, and the bytes sent by all ranks."""
    parts, traffic = [shard(x, 2).requires_grad_() for x in (q, k, v)], Traffic()
    o = context_parallel_attention(*parts, bias, tolerance=tolerance, traffic=traffic)
    gradients = torch.autograd.grad(o, parts, shard(grad_o, 2))
    sent = torch.tensor(traffic.total)
    dist.all_reduce(sent)
    return [unshard(x, 2) for x in (o, *gradients)], sent.item()


def attend_alone(q, k, v, grad_o, bias):
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = biased_flash_attn(*leaves, bias)
    return [o, *torch.autograd.grad(o, leaves, grad_o)]


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks draw the same sequence
    q, k, v, grad_o = torch.randn(4, 1, HEADS, LENGTH, DIM)
    bias = biases.ALiBi(HEADS, shift=-2)
    results, sent = attend_in_parts(q, k, v, grad_o, bias, tolerance=None)
    _, sent_without = attend_in_parts(q, k, v, grad_o, bias, tolerance=0.0)
    if dist.get_rank() == 0:
        exact = attend_alone(q, k, v, grad_o, bias)
        for name, x, expected in zip(("o", "dq", "dk", "dv"), results, exact, strict=True):
            torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5)
            print(f"{name:2} of {dist.get_world_size()} ranks equals that of one process")
        print(f"{sent / 1e6:.1f} MB sent, {sent_without / 1e6:.1f} MB without skipping")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torchrun(["--standalone", "--nproc-per-node=2", __file__])
