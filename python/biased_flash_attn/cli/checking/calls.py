"""The public calls that are checked."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from ... import (
    KVCache,
    biased_flash_attn,
    biased_flash_attn_varlen,
    biased_flash_attn_with_kvcache,
)
from .problems import DECODING_STEPS, KV_HEADS, Problem, dropped


def results(problem: Problem, backend: str) -> dict[str, Tensor]:
    """o, lse and, except for decoding, the gradients of all leaves, by name.

    Decoding has results for its last steps only, and zeros elsewhere.
    """
    if problem.call.name == "decoding":
        o, lse = decoded(problem, backend)
        return {"o": o, "lse": lse}
    o, lse = (packed if problem.call.name == "packed" else batched)(problem, backend)
    grads = problem.grad_o, problem.grad_lse
    gradients = torch.autograd.grad((o, lse), [*problem.leaves.values()], grads)
    names = (f"gradient of {name}" for name in problem.leaves)
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(names, gradients, strict=True))}


def batched(problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    causal = problem.call.causal
    return biased_flash_attn(
        *problem.inputs, problem.bias(), causal=causal, return_lse=True, backend=backend
    )


def packed(problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    q, k, v = (x[0].transpose(0, 1) for x in problem.inputs)
    ends = itertools.accumulate(len(rows) for _, rows in problem.sequences)
    offsets = torch.tensor([0, *ends], dtype=torch.int32, device=q.device)
    o, lse = biased_flash_attn_varlen(
        q, k, v, offsets, offsets, problem.bias(), return_lse=True, backend=backend
    )
    return o.transpose(0, 1)[None], lse[None]


@torch.no_grad()
def decoded(problem: Problem, backend: str) -> tuple[Tensor, Tensor]:
    q, k, v = problem.inputs
    batch, _, length, head_dim = q.shape
    cache = KVCache(batch, KV_HEADS, head_dim, dtype=q.dtype, device=q.device)
    o, lse = torch.zeros_like(q), torch.zeros_like(problem.grad_lse)
    prompt = length - sum(DECODING_STEPS)
    ends = [prompt, *(prompt + n for n in itertools.accumulate(DECODING_STEPS))]
    for first, end in itertools.pairwise([0, *ends]):
        tokens = slice(first, end)
        new, bias = (x[:, :, tokens] for x in (k, v)), problem.bias_of_step(first, end)
        results = biased_flash_attn_with_kvcache(
            q[:, :, tokens], cache, *new, bias, return_lse=True, backend=backend
        )
        if first == 0:
            cache.truncate([prompt] * (batch - 1) + [prompt - dropped(length)])
        else:
            o[:, :, tokens], lse[:, :, tokens] = results
    return o, lse
