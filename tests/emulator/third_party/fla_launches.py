"""Launches of kernels of the package fla-core: chunks of 64 tokens, the last one partial."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tests.emulator.third_party.launches import Launch

BATCH, TOKENS, HEADS, WIDTH, CHUNK = 1, 100, 2, 64, 64
CHUNKS = math.ceil(TOKENS / CHUNK)
SCALE = WIDTH**-0.5
HALF = torch.float16
COMMON = {"cu_seqlens": None, "chunk_indices": None, "T": TOKENS, "IS_VARLEN": False, "BT": CHUNK}
SIZES = {"H": HEADS, "K": WIDTH, "V": WIDTH}
WARPGROUP = {"num_warps": 4, "num_stages": 3}
Rounding = Callable[[Tensor], Tensor]


def sums_of_chunks() -> Launch:
    steps = torch.randn(BATCH, TOKENS, HEADS)

    def sums(x: Tensor, rounded: Rounding) -> Tensor:
        return joined(in_chunks(x[..., None]).cumsum(-2))[..., 0]

    return Launch(
        "fla.ops.utils.cumsum:chunk_local_cumsum_scalar_kernel",
        (CHUNKS * BATCH * HEADS,),
        {
            **COMMON,
            "s": steps,
            "o": torch.empty_like(steps),
            "scale": None,
            "B": BATCH,
            "H": HEADS,
            "REVERSE": False,
            "HAS_SCALE": False,
        },
        {"o": computed(sums, torch.float32, steps)},
        {"num_warps": 2},
    )


def products_of_keys() -> Launch:
    """The strictly lower triangles of beta K K^T, with decay."""
    k, beta, g = tokens(), torch.rand(BATCH, TOKENS, HEADS).to(HALF), decays()

    def products(k: Tensor, beta: Tensor, g: Tensor, rounded: Rounding) -> Tensor:
        k, beta, g = in_chunks(k), in_chunks(beta[..., None]), in_chunks(g[..., None])
        return joined((beta * (k @ k.mT) * (g - g.mT).exp2()).tril(-1))

    return Launch(
        "fla.ops.common.chunk_scaled_dot_kkt:chunk_scaled_dot_kkt_fwd_kernel",
        (CHUNKS, BATCH * HEADS),
        {
            **COMMON,
            "k": k,
            "g": g,
            "beta": beta,
            "A": torch.empty(BATCH, TOKENS, HEADS, CHUNK),
            "H": HEADS,
            "HV": HEADS,
            "K": WIDTH,
            "BK": 32,
            "USE_G": True,
        },
        {"A": computed(products, torch.float32, k, beta, g)},
        WARPGROUP,
    )


def inverses() -> Launch:
    """(1 + A)^-1 of strictly lower triangles A."""
    below = in_chunks(torch.randn(BATCH, TOKENS, HEADS, CHUNK) / 8).tril(-1)
    a = joined(below).contiguous()

    def inverse(a: Tensor, rounded: Rounding) -> Tensor:
        one = torch.eye(CHUNK, dtype=a.dtype)
        return joined(torch.linalg.solve_triangular(one + in_chunks(a), one, upper=False))

    return Launch(
        "fla.ops.utils.solve_tril:merge_16x16_to_64x64_inverse_kernel",
        (CHUNKS, BATCH * HEADS),
        {
            **COMMON,
            "A": a,
            "Ai": torch.zeros_like(a),  # the kernel does not write the upper triangles
            "H": HEADS,
            "USE_TMA": False,
            "DOT_PRECISION": "ieee",
        },
        {"Ai": computed(inverse, torch.float32, a)},
    )


def outputs() -> Launch:
    """Gated linear attention from the state at each chunk's start."""
    q, k, v, g, h = tokens(), tokens(), tokens(), decays(), states()

    def attended(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, h: Tensor, rounded: Rounding
    ) -> Tensor:
        q, k, v, g = in_chunks(q), in_chunks(k), in_chunks(v), in_chunks(g[..., None])
        within = rounded((q @ k.mT * (g - g.mT).exp2()).tril()) @ v
        return joined(SCALE * (q @ h * g.exp2() + within))

    return Launch(
        "fla.ops.common.chunk_o:chunk_fwd_kernel_o",
        (WIDTH // 32 * CHUNKS, BATCH * HEADS),
        {
            **COMMON,
            **SIZES,
            "q": q,
            "k": k,
            "v": v,
            "h": h,
            "g": g,
            "g_gamma": None,
            "o": torch.empty_like(v),
            "scale": SCALE,
            "HV": HEADS,
            "BK": 32,
            "BV": 32,
            "USE_G": True,
            "USE_G_GAMMA": False,
            "STATE_V_FIRST": False,
        },
        {"o": computed(attended, HALF, q, k, v, g, h)},
        WARPGROUP,
    )


def gradients() -> Launch:
    """Gradients of queries, keys, decays and of the delta rule's w; with Triton 3.4 to 3.7.0 this
    kernel was wrong on Hopper (issue 640 of flash-linear-attention).

    It has one stage: with more, 3.7.1 and 3.9.0 have another race, which test_fla.py shows.
    """
    q, k, v, grad_o, grad_v = (tokens() for _ in range(5))
    g, h, grad_h = decays(), states(), states()
    inputs = q, k, v, grad_o, grad_v, g, h, grad_h
    dtypes = HALF, HALF, HALF, torch.float32
    expected = all_computed(gradients_of_chunks, dtypes, *inputs)
    return Launch(
        "fla.ops.common.chunk_o:chunk_bwd_kernel_dqkwg",
        (CHUNKS, BATCH * HEADS),
        {
            **COMMON,
            **SIZES,
            "q": q,
            "k": k,
            "v": v,
            "g": g,
            "g_gamma": None,
            "h": h,
            "do": grad_o,
            "dh": grad_h,
            "dq": torch.empty_like(q),
            "dk": torch.empty_like(q),
            "dw": torch.empty_like(q),
            "dv": grad_v,
            "dg": torch.empty(1, BATCH, TOKENS, HEADS),
            "scale": SCALE,
            "B": BATCH,
            "HV": HEADS,
            "BK": 64,
            "BV": 32,
            "USE_G": True,
            "USE_G_GAMMA": False,
            "USE_DW": True,
            "STATE_V_FIRST": False,
        },
        dict(zip(("dq", "dk", "dw", "dg"), expected, strict=True)),
        {"num_warps": 4, "num_stages": 1},
    )


def gradients_of_chunks(q, k, v, grad_o, grad_v, g, h, grad_h, rounded: Rounding) -> list[Tensor]:
    q, k, v, grad_o, grad_v = map(in_chunks, (q, k, v, grad_o, grad_v))
    # The last chunk's decay is that of its last token.
    filled = in_chunks(torch.ones_like(g)[..., None])
    g = in_chunks(g[..., None])
    last = torch.where(filled > 0, g, math.inf).amin(-2, keepdim=True)
    is_last = (filled.cumsum(-2) == filled.sum(-2, keepdim=True)) & (filled > 0)
    scores = rounded((grad_o @ v.mT * (g - g.mT).exp2()).tril() * SCALE)
    dq = grad_o @ h.mT * g.exp2() * SCALE
    dk = v @ grad_h.mT * (last - g).exp2() * filled
    of_state = (h * grad_h).sum((-2, -1), keepdim=True) * last.exp2()
    of_state = of_state + (dk * k).sum((-2, -1), keepdim=True)
    dq, dk = dq + scores @ k, dk + scores.mT @ q
    dg = (dq * q).sum(-1, keepdim=True) - (dk * k).sum(-1, keepdim=True) + is_last * of_state
    return [joined(dq), joined(dk), -joined(grad_v @ h.mT), joined(dg)[None, ..., 0]]


def gradients_of_delta_rule() -> Launch:
    """Gradients of the delta rule's keys, values and betas, with two warps."""
    k, v, grad_w, grad_u = (tokens() for _ in range(4))
    beta = torch.rand(BATCH, TOKENS, HEADS).to(HALF)
    a = joined(in_chunks(torch.randn(BATCH, TOKENS, HEADS, CHUNK) / 8).tril()).to(HALF).contiguous()
    inputs = k, v, beta, a, grad_w, grad_u
    expected = all_computed(gradients_of_representation, (HALF, HALF, HALF), *inputs)
    return Launch(
        "fla.ops.delta_rule.wy_fast:prepare_wy_repr_bwd_kernel",
        (CHUNKS, BATCH * HEADS),
        {
            **COMMON,
            **SIZES,
            "k": k,
            "v": v,
            "beta": beta,
            "A": a,
            "dw": grad_w,
            "du": grad_u,
            "dk": torch.empty_like(k),
            "dv": torch.empty_like(v),
            "dbeta": torch.empty_like(beta),
            "BK": 32,
            "BV": 32,
        },
        dict(zip(("dk", "dv", "dbeta"), expected, strict=True)),
        {"num_warps": 2, "num_stages": 2},
    )


def gradients_of_representation(k, v, beta, a, grad_w, grad_u, rounded: Rounding) -> list[Tensor]:
    k, v, a, grad_w, grad_u = map(in_chunks, (k, v, a, grad_w, grad_u))
    beta = in_chunks(beta[..., None])
    of_keys, of_values = a.mT @ grad_w, a.mT @ grad_u
    dbeta = (of_keys * k + of_values * v).sum(-1, keepdim=True)
    of_a = (grad_u @ rounded(v * beta).mT + grad_w @ rounded(k * beta).mT).tril(-1)
    of_a = -rounded((a.mT @ rounded(rounded(of_a) @ a.mT)).tril(-1))
    dk = rounded(of_keys * beta)  # the kernel stores it in memory in between
    dbeta = dbeta + (of_a @ k * k).sum(-1, keepdim=True)
    dk = dk + of_a.mT @ rounded(k * beta) + of_a @ k * beta
    return [joined(dk), joined(of_values * beta), joined(dbeta)[..., 0]]


def tokens() -> Tensor:
    return torch.randn(BATCH, TOKENS, HEADS, WIDTH).to(HALF)


def states() -> Tensor:
    return (torch.randn(BATCH, CHUNKS, HEADS, WIDTH, WIDTH) / 8).to(HALF)


def decays() -> Tensor:
    """Logarithms to base 2, decreasing within each chunk."""
    return joined(in_chunks(-torch.rand(BATCH, TOKENS, HEADS, 1) / 16).cumsum(-2))[
        ..., 0
    ].contiguous()


def in_chunks(x: Tensor) -> Tensor:
    """(batch, tokens, heads, width) to (batch, chunks, heads, chunk, width), padded with zeros."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, CHUNKS * CHUNK - TOKENS))
    return padded.unflatten(1, (CHUNKS, CHUNK)).transpose(2, 3)


def joined(x: Tensor) -> Tensor:
    return x.transpose(2, 3).flatten(1, 2)[:, :TOKENS]


def computed(function, dtype: torch.dtype, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    (both,) = all_computed(lambda *x, rounded: [function(*x, rounded=rounded)], (dtype,), *inputs)
    return both


def all_computed(
    function, dtypes: tuple[torch.dtype, ...], *inputs: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """Each result in float64, and in float32 with intermediate results rounded to float16."""
    exact = function(*(x.double() for x in inputs), rounded=lambda x: x)
    plain = function(*(x.float() for x in inputs), rounded=lambda x: x.to(HALF).float())
    rounded = (result.to(dtype) for result, dtype in zip(plain, dtypes, strict=True))
    return list(zip(exact, rounded, strict=True))
