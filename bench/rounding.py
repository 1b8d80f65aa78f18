"""The effect of rounding dS on the gradients of a forget gate's steps.

    python bench/rounding.py

It simulates in plain PyTorch how the Triton kernels round to bfloat16: o, from which D is computed,
and dS, in the sums over keys, over queries, or in both. Errors are relative to float64; inputs are
normal, and steps are uniform between 0 and twice their average.
"""

from __future__ import annotations

import torch
from torch import Tensor

HEAD_DIM = 64


def gradient_of_logits(q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor, steps: Tensor, real):
    """dS in the dtype real, from o in bfloat16 or, for float64, in float64."""
    q, k, v, grad_o = (x.to(real) for x in (q, k, v, grad_o))
    sums = steps.cumsum(0)
    s = q @ k.T * HEAD_DIM**-0.5 + (sums[:, None] - sums).to(real)
    p = s.masked_fill(torch.ones_like(s).triu(1).bool(), -torch.inf).softmax(-1)
    o = p @ v if real == torch.float64 else (p @ v).bfloat16().to(real)
    return p * (grad_o @ v.T - (grad_o * o).sum(-1, keepdim=True))


def gradient_of_steps(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    return (of_queries.double() - of_keys.double()).flip(0).cumsum(0).flip(0)


def main() -> None:
    print("| tokens | average step | both passes alike | float32 in one | sums over keys known |")
    print("|---|---|---|---|---|")
    for n, average in ((1024, -0.02), (1024, -0.2), (4096, -0.02), (4096, -0.2)):
        torch.manual_seed(0)
        qkv_do = [torch.randn(n, HEAD_DIM).bfloat16() for _ in range(4)]
        steps = 2 * average * torch.rand(n, dtype=torch.float64)
        exact = gradient_of_logits(*qkv_do, steps, torch.float64)
        exact = gradient_of_steps(exact.sum(1), exact.sum(0))
        fine = gradient_of_logits(*qkv_do, steps, torch.float32)
        coarse = fine.bfloat16().double()
        fine = fine.double()
        ways = (
            (coarse.sum(1), coarse.sum(0)),
            (coarse.sum(1), fine.sum(0)),
            (torch.zeros(n), fine.sum(0)),
        )
        errors = ((gradient_of_steps(*way) - exact).norm() / exact.norm() for way in ways)
        print(f"| {n} | {average} | {' | '.join(f'{error:.1%}' for error in errors)} |")


if __name__ == "__main__":
    main()
