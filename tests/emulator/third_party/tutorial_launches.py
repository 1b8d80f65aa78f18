"""Launches of tutorial_kernels.py, with sizes that are no multiples of blocks where they may."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.emulator.third_party.launches import Launch

HALF = torch.float16
MODULE = "tests.emulator.third_party.tutorial_kernels"


def softmax() -> Launch:
    x = torch.randn(7, 781)
    return Launch(
        f"{MODULE}:softmax_kernel",
        (3,),
        {"y": torch.empty_like(x), "x": x, "rows": 7, "columns": 781, "BLOCK": 1024, "STAGES": 4},
        {"y": (x.double().softmax(-1), x.softmax(-1))},
        {"num_warps": 8},
    )


def product(dtype: torch.dtype, blocks: tuple[int, int, int], **options: int) -> Launch:
    m, n, k = 200, 136, 144
    a, b = ((torch.randn(rows, k) / 4).to(dtype) for rows in (m, n))
    return Launch(
        f"{MODULE}:matmul_kernel",
        (-(-m // blocks[0]) * -(-n // blocks[1]),),
        {
            **{"a": a, "b": b, "c": torch.empty(m, n, dtype=HALF), "m": m, "n": n, "k": k},
            **dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), blocks, strict=True)),
            "GROUP": 2,
        },
        {"c": in_both(lambda a, b: F.leaky_relu(a @ b.mT), HALF, a, b)},
        options,
    )


def product_with_eight_warps() -> Launch:
    return product(HALF, (128, 128, 64), num_warps=8, num_stages=3)


def product_with_four_warps() -> Launch:
    return product(HALF, (64, 64, 32), num_warps=4, num_stages=4)


def product_of_float8() -> Launch:
    return product(torch.float8_e5m2, (64, 64, 64), num_warps=4, num_stages=4)


def persistent_product() -> Launch:
    m, n, k = 264, 144, 200
    a, b = (torch.randn(rows, k).to(HALF) / 4 for rows in (m, n))
    tensors = {"a": a, "b": b, "c": torch.empty(m, n, dtype=HALF)}
    blocks = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64}
    boxes = (128, 64), (64, 64), (128, 64)
    pairs = zip(tensors.items(), boxes, strict=True)
    described = {name: TensorDescriptor.from_tensor(x, list(box)) for (name, x), box in pairs}
    return Launch(
        f"{MODULE}:persistent_matmul_kernel",
        (4,),
        {**described, **blocks},
        {"c": in_both(lambda a, b: a @ b.mT, HALF, a, b)},
        {"num_warps": 4, "num_stages": 3},
    )


def layer_norm_gradients() -> Launch:
    """More rows than groups: several programs add to the sums of one."""
    rows, columns, groups = 12, 1000, 4
    x, grad_y = (torch.randn(rows, columns).to(HALF) for _ in range(2))
    weight = torch.rand(columns).to(HALF)

    def gradients(x: Tensor, weight: Tensor, grad_y: Tensor) -> list[Tensor]:
        normalized = F.layer_norm(x, (columns,))
        of_rows = F.layer_norm(x.requires_grad_(), (columns,), weight)
        (grad_x,) = torch.autograd.grad(of_rows, x, grad_y)
        by_group = (y.unflatten(0, (-1, groups)).sum(0) for y in (grad_y * normalized, grad_y))
        return [grad_x, *by_group]

    exact = gradients(*(y.double() for y in (x, weight, grad_y)))
    plain = gradients(*(y.float() for y in (x, weight, grad_y)))
    plain[0] = plain[0].to(HALF)
    names = "grad_x", "grad_weight", "grad_bias"
    exact_x = x.double()
    return Launch(
        f"{MODULE}:layer_norm_gradient_kernel",
        (rows,),
        {
            "grad_x": torch.empty_like(x),
            **{name: torch.zeros(groups, columns) for name in names[1:]},
            **{"grad_y": grad_y, "x": x, "weight": weight},
            "mean": exact_x.mean(1).float(),
            "rstd": (exact_x.var(1, correction=0) + 1e-5).rsqrt().float(),
            "locks": torch.zeros(2 * groups, dtype=torch.int32),
            **{"columns": columns, "GROUPS": groups, "BLOCK": 1024},
        },
        dict(zip(names, zip(exact, plain, strict=True), strict=True)),
    )


def attention(*, causal: bool) -> Launch:
    heads, length, width = 2, 256, 64
    q, k, v = (torch.randn(heads, length, width).to(HALF) for _ in range(3))
    attended = partial(F.scaled_dot_product_attention, is_causal=causal, scale=0.1)

    def described(x: Tensor, rows: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(x.view(-1, width), [rows, width])

    o = described(torch.empty_like(q), 128)
    exact, plain = in_both(attended, HALF, q, k, v)
    return Launch(
        f"{MODULE}:attention_kernel",
        (length // 128, heads),
        {
            **{"q": described(q, 128), "k": described(k, 64), "v": described(v, 64), "o": o},
            **{"scale": 0.1, "length": length, "CAUSAL": causal},
            **{"BLOCK_M": 128, "BLOCK_N": 64, "WIDTH": width},
        },
        {"o": (exact.flatten(0, 1), plain.flatten(0, 1))},
        {"num_warps": 4, "num_stages": 3},
    )


def causal_attention() -> Launch:
    return attention(causal=True)


def bidirectional_attention() -> Launch:
    return attention(causal=False)


def in_both(function, dtype: torch.dtype, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The result in float64, and in float32 rounded to dtype."""
    exact, plain = (function(*(x.to(real) for x in inputs)) for real in (torch.double, torch.float))
    return exact, plain.to(dtype)
