"""Runs the compiled kernels of Triton's tutorials in the emulator, and compares with PyTorch.

    python -m tests.emulator.third_party.tutorials PATH --arch 90 --seed 1

PATH is the folder python/tutorials of a checkout of Triton. Only the kernels are imported: the code
around them needs a GPU when it is imported, and searches for configurations.
"""

from __future__ import annotations

import ast
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from torch import Tensor

HALF = torch.float16
DESCRIPTORS = 90  # architectures from this one on have tensor descriptors in hardware


@dataclass
class Case:
    """A run of a tutorial's kernels, which yields names, results and float64 results."""

    name: str
    run: Callable[[types.ModuleType], Iterator[tuple[str, Tensor, Tensor]]]
    tutorial: str
    oldest: int = 80


def kernels_of(path: Path) -> types.ModuleType:
    """A module of a tutorial's kernels, without the code that chooses their configurations."""
    import triton
    import triton.language as tl

    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and only_jit(node)]
    module = types.ModuleType(path.stem)
    module.__dict__.update(torch=torch, triton=triton, tl=tl, __file__=str(path))
    sys.modules[path.stem] = module
    exec(compile(tree, path, "exec"), module.__dict__)
    return module


def only_jit(function: ast.FunctionDef) -> bool:
    """Whether it is a kernel. Removes all decorators except triton.jit."""
    made = [one for one in function.decorator_list if "triton.jit" in ast.unparse(one)]
    if made:
        (jit,) = made
        name = jit.func if isinstance(jit, ast.Call) else jit
        function.decorator_list = [name]
    return bool(made)


def softmax(module) -> Iterator:
    x = torch.randn(7, 781)
    y = torch.empty_like(x)
    sizes = x.stride(0), y.stride(0), *x.shape
    module.softmax_kernel[(3,)](y, x, *sizes, BLOCK_SIZE=1024, num_stages=4, num_warps=8)
    yield "y", y, x.double().softmax(-1)


def matmul(dtype: torch.dtype, blocks: tuple[int, int, int], **options: int):
    def run(module) -> Iterator:
        rows, inner, columns = 200, 144, 136
        a = (torch.randn(rows, inner) / 4).to(dtype)
        b = (torch.randn(columns, inner) / 4).to(dtype).T
        c = torch.empty(rows, columns, dtype=HALF)
        block_m, block_n, block_k = blocks
        module.matmul_kernel[(-(-rows // block_m) * -(-columns // block_n),)](
            a,
            b,
            c,
            rows,
            columns,
            inner,
            *(stride for tensor in (a, b, c) for stride in tensor.stride()),
            BLOCK_SIZE_M=block_m,
            BLOCK_SIZE_N=block_n,
            BLOCK_SIZE_K=block_k,
            GROUP_SIZE_M=2,
            ACTIVATION="leaky_relu",
            **options,
        )
        exact = a.double() @ b.double()
        yield "c", c, torch.nn.functional.leaky_relu(exact, 0.01)

    return run


def layer_norm(module) -> Iterator:
    """More rows than locks: blocks wait for each other."""
    rows, columns, groups = 12, 1000, 4
    x, grad_y = (torch.randn(rows, columns).to(HALF) for _ in range(2))
    weight, bias = (torch.rand(columns).to(HALF) for _ in range(2))
    y, grad_x = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = torch.empty(rows), torch.empty(rows)
    module._layer_norm_fwd_fused[(rows,)](
        x, y, weight, bias, mean, rstd, columns, columns, 1e-5, BLOCK_SIZE=1024, num_warps=4
    )
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    exact = torch.nn.functional.layer_norm(leaves[0], (columns,), *leaves[1:])
    gradients = torch.autograd.grad(exact, leaves, grad_y.double())
    yield "y", y, exact

    locks = torch.zeros(2 * groups, dtype=torch.int32)
    partial_weight, partial_bias = torch.zeros(2, groups, columns)
    module._layer_norm_bwd_dx_fused[(rows,)](
        grad_x,
        grad_y,
        partial_weight,
        partial_bias,
        x,
        weight,
        mean,
        rstd,
        locks,
        columns,
        columns,
        GROUP_SIZE_M=groups,
        BLOCK_SIZE_N=1024,
        num_warps=4,
    )
    grad_weight, grad_bias = torch.empty(2, columns)
    module._layer_norm_bwd_dwdb[(-(-columns // 128),)](
        partial_weight,
        partial_bias,
        grad_weight,
        grad_bias,
        groups,
        columns,
        BLOCK_SIZE_M=32,
        BLOCK_SIZE_N=128,
    )
    yield "grad of x", grad_x, gradients[0]
    # The kernel sums in the dtype of the weights.
    yield "grad of weight", grad_weight.to(HALF), gradients[1]
    yield "grad of bias", grad_bias.to(HALF), gradients[2]


def attention(causal: bool, host_descriptors: bool, backward: bool):
    def run(module) -> Iterator:
        from triton.tools.tensor_descriptor import TensorDescriptor

        batch, heads, n, width, scale = 1, 2, 256, 64, 0.3
        q, k, v, grad_o = (torch.randn(batch, heads, n, width).to(HALF) / 2 for _ in range(4))
        o, lse = torch.empty_like(q), torch.empty(batch, heads, n)

        def described(x: Tensor, rows: int):
            shape = [batch * heads * n, width]
            return TensorDescriptor(x, shape, [width, 1], [rows, width]) if host_descriptors else x

        module._attn_fwd[(n // 128, batch * heads)](
            scale,
            lse,
            batch,
            heads,
            *(described(x, rows) for x, rows in ((q, 128), (k, 64), (v, 64), (o, 128))),
            N_CTX=n,
            HEAD_DIM=width,
            BLOCK_M=128,
            BLOCK_N=64,
            FP8_OUTPUT=False,
            STAGE=3 if causal else 1,
            warp_specialize=False,
            IS_HOPPER=host_descriptors,
            num_warps=4,
            num_stages=3,
        )
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        exact = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=causal, scale=scale
        )
        yield "o", o, exact
        if backward:
            grads = torch.autograd.grad(exact, leaves, grad_o.double())
            yield from attention_backward(module, q, k, v, o, lse, grad_o, scale, causal, grads)

    return run


def attention_backward(module, q, k, v, o, lse, grad_o, scale, causal, exact) -> Iterator:
    batch, heads, n, width = q.shape
    delta = torch.empty_like(lse)
    module._attn_bwd_preprocess[(n // 128, batch * heads)](
        o, grad_o, delta, batch, heads, n, BLOCK_M=128, HEAD_DIM=width
    )
    grads = [torch.empty_like(x) for x in (q, k, v)]
    scaled = k * (scale * 1.4426950408889634)  # the kernel takes exponentials to the base 2
    module._attn_bwd[(n // 128, 1, batch * heads)](
        q,
        scaled,
        v,
        scale,
        grad_o,
        *grads,
        lse,
        delta,
        *q.stride(),
        heads,
        n,
        BLOCK_M1=32,
        BLOCK_N1=128,
        BLOCK_M2=128,
        BLOCK_N2=32,
        BLK_SLICE_FACTOR=2,
        HEAD_DIM=width,
        CAUSAL=causal,
        num_warps=4,
        num_stages=5,
    )
    for name, grad, expected in zip(("q", "k", "v"), grads, exact, strict=True):
        yield f"grad of {name}", grad, expected


def persistent(kernel: str, **constants):
    """A matrix product by fewer blocks than there are tiles."""

    def run(module) -> Iterator:
        from triton.tools.tensor_descriptor import TensorDescriptor

        rows, inner, columns = 264, 200, 144
        a, b = (torch.randn(n, inner).to(HALF) / 4 for n in (rows, columns))
        c = torch.empty(rows, columns, dtype=HALF)
        if "tma" in kernel:
            width = 32 if constants.get("EPILOGUE_SUBTILE") else 64
            shapes = (128, 64), (64, 64), (128, width)
            pairs = zip((a, b, c), shapes, strict=True)
            tensors = [TensorDescriptor.from_tensor(x, list(shape)) for x, shape in pairs]
            sizes = rows, columns, inner
        else:
            tensors, sizes = [a, b, c], (rows, columns, inner)
        if kernel == "matmul_kernel_persistent":
            sizes += (*a.stride(), *b.T.stride(), *c.stride())
        getattr(module, kernel)[(constants.get("NUM_SMS", 9),)](
            *tensors,
            *sizes,
            BLOCK_SIZE_M=128,
            BLOCK_SIZE_N=64,
            BLOCK_SIZE_K=64,
            GROUP_SIZE_M=2,
            **constants,
            num_stages=3,
            num_warps=4,
        )
        yield "c", c, a.double() @ b.double().T

    return run


MATMUL, ATTENTION, PERSISTENT = (
    "03-matrix-multiplication.py",
    "06-fused-attention.py",
    "09-persistent-matmul.py",
)
TMA = {"FP8_OUTPUT": False, "WARP_SPECIALIZE": False}
CASES = (
    Case("softmax", softmax, "02-fused-softmax.py"),
    Case(
        "matmul, 8 warps",
        matmul(HALF, (128, 128, 64), num_stages=3, num_warps=8),
        MATMUL,
    ),
    Case(
        "matmul, 4 warps",
        matmul(HALF, (64, 64, 32), num_stages=4, num_warps=4),
        MATMUL,
    ),
    Case(
        "matmul of float8",
        matmul(torch.float8_e5m2, (64, 64, 64), num_stages=4, num_warps=4),
        MATMUL,
    ),
    Case("layer norm and its gradients", layer_norm, "05-layer-norm.py"),
    Case("attention, device descriptors", attention(False, False, False), ATTENTION),
    Case("attention and its gradients", attention(False, False, True), ATTENTION),
    Case("causal attention and its gradients", attention(True, False, True), ATTENTION),
    Case(
        "causal attention, host descriptors",
        attention(True, True, False),
        ATTENTION,
        DESCRIPTORS,
    ),
    Case(
        "persistent matmul",
        persistent("matmul_kernel_persistent", NUM_SMS=4),
        PERSISTENT,
    ),
    Case(
        "matmul, host descriptors",
        persistent("matmul_kernel_tma", **TMA),
        PERSISTENT,
        DESCRIPTORS,
    ),
    Case(
        "persistent matmul, host descriptors",
        persistent("matmul_kernel_tma_persistent", NUM_SMS=4, EPILOGUE_SUBTILE=True, **TMA),
        PERSISTENT,
        DESCRIPTORS,
    ),
    Case(
        "persistent matmul, device descriptors",
        persistent(
            "matmul_kernel_descriptor_persistent",
            NUM_SMS=4,
            EPILOGUE_SUBTILE=False,
            WARP_SPECIALIZE=False,
            FLATTEN=True,
        ),
        PERSISTENT,
        DESCRIPTORS,
    ),
)


@click.command()
@click.argument("path", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--arch", default=90, show_default=True, help="compute capability, 90 for Hopper")
@click.option("--seed", default=0, show_default=True, help="of inputs and of interleavings")
@click.option("--only", default="", help="run the cases whose names contain this")
def main(path: Path, arch: int, seed: int, only: str) -> None:
    """Runs the kernels of the tutorials in PATH in the emulator."""
    from tests import emulator
    from tests.emulator.triton_device import triton_device
    from tests.support.numerics import assert_close_to_float64

    failed = 0
    with triton_device(arch, seed):
        for case in CASES:
            if arch < case.oldest or only not in case.name:
                continue
            torch.manual_seed(seed)
            start = time.perf_counter()
            try:
                for what, actual, exact in case.run(kernels_of(path / case.tutorial)):
                    # Scores and other intermediate sums are rounded to float16.
                    plain = exact.to(actual.dtype) * (1 + 2 * torch.finfo(HALF).eps)
                    exact, plain = exact.detach(), plain.detach()
                    assert_close_to_float64(actual, exact, plain, what, exact.abs())
                outcome = "right"
            except (AssertionError, emulator.Fault) as error:
                outcome, failed = f"WRONG: {error}", failed + 1
            print(f"{case.name}: {outcome} ({time.perf_counter() - start:.1f} s)", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    main()
