"""Starts the kernels on tensors. Results are allocated here; nothing is copied but small bias terms."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from .configs import config
from .forward import attn_fwd_kernel
from .operands import Bias, Problem, per_head, rows
from .primitives import LOG2E


def forward(q, k, v, terms, gain, form, scale, causal, window):
    """o (B, H, Nq, Dv) in q's dtype and lse (B, H, Nq) in float32."""
    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    c = config("forward")
    grid = (q.shape[0]*q.shape[1], triton.cdiv(q.shape[2], c.block_m))
    problem = _problem(q, k, v, scale, causal, window)
    bias = _bias(q, terms, gain, form, scale)
    attn_fwd_kernel[grid](rows(q), rows(k), rows(v), rows(o), rows(lse), bias, problem, BLOCK_M=c.block_m, BLOCK_N=c.block_n,
       BLOCK_D=max(16, triton.next_power_of_2(q.shape[3])), BLOCK_DV=max(16, triton.next_power_of_2(v.shape[3])), num_warps=c.num_warps, num_stages=c.num_stages)
    return o, lse

def _problem(q,k,v,scale,causal,window):
    n_key = k.shape[2]
    return Problem(q.shape[1], q.shape[1]//k.shape[1], q.shape[2], n_key, n_key if window is None else min(window, n_key), scale, scale*LOG2E.value,
       triton.language.constexpr(q.shape[3]), triton.language.constexpr(v.shape[3]), triton.language.constexpr(causal), triton.language.constexpr(window is not None), triton.language.constexpr(scale > 0))

def _bias(q, terms, gain, form, scale):
    C = triton.language.constexpr
    squared = form == "log1p_square"
    if squared: form = "cumulative"
    if form == "distance": terms = terms*LOG2E.value
    factored = form in ("linear", "cumulative") and not squared and scale > 0 and q.dtype != torch.float32
    return Bias(C(form), C(squared), C(factored), per_head(terms), per_head(gain))
