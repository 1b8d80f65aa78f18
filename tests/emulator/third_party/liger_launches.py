"""Launches of kernels of the package liger-kernel, in bfloat16 with rows of 1000 columns."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.emulator.third_party.launches import Launch

ROWS, COLUMNS, BLOCK = 3, 1000, 1024
BF16 = torch.bfloat16
EPSILON = 1e-5


def softmax_forward() -> Launch:
    x = torch.randn(ROWS, COLUMNS, dtype=BF16) * 4
    y = torch.empty_like(x)
    return Launch(
        "liger_kernel.ops.softmax:_softmax_single_block_forward_kernel",
        (ROWS,),
        {
            "Y_ptr": y,
            "Y_row_stride": COLUMNS,
            "X_ptr": x,
            "X_row_stride": COLUMNS,
            "n_cols": COLUMNS,
            "BLOCK_SIZE": BLOCK,
        },
        {"Y_ptr": computed(lambda x: x.softmax(-1), x)},
    )


def softmax_backward() -> Launch:
    y = torch.randn(ROWS, COLUMNS).softmax(-1).to(BF16)
    grad_y = torch.randn(ROWS, COLUMNS, dtype=BF16)

    def gradient(grad: Tensor, y: Tensor) -> Tensor:
        return y * (grad - (grad * y).sum(-1, keepdim=True))

    return Launch(
        "liger_kernel.ops.softmax:_softmax_single_block_backward_kernel",
        (ROWS,),
        {
            "dy_ptr": grad_y,
            "dy_stride": COLUMNS,
            "y_ptr": y,
            "y_stride": COLUMNS,
            "dx_ptr": torch.empty_like(y),
            "dx_stride": COLUMNS,
            "n_cols": COLUMNS,
            "BLOCK_SIZE": BLOCK,
        },
        {"dx_ptr": computed(gradient, grad_y, y)},
    )


def layer_norm_forward() -> Launch:
    x, weight, bias = rows_and_weights()
    y = torch.empty_like(x)
    return Launch(
        "liger_kernel.ops.layer_norm:_layer_norm_forward_kernel",
        (ROWS,),
        {
            "Y_ptr": y,
            "Y_row_stride": COLUMNS,
            "X_ptr": x,
            "X_row_stride": COLUMNS,
            "W_ptr": weight,
            "W_row_stride": 1,
            "B_ptr": bias,
            "B_row_stride": 1,
            "Mean_ptr": torch.empty(ROWS),
            "Mean_row_stride": 1,
            "RSTD_ptr": torch.empty(ROWS),
            "RSTD_row_stride": 1,
            "n_cols": COLUMNS,
            "eps": EPSILON,
            "BLOCK_SIZE": BLOCK,
        },
        {
            "Y_ptr": computed(normalized, x, weight, bias),
            "Mean_ptr": both(lambda x: x.mean(-1), x),
            "RSTD_ptr": both(lambda x: (x.var(-1, correction=0) + EPSILON).rsqrt(), x),
        },
    )


def layer_norm_backward() -> Launch:
    """Two blocks; the second has one row."""
    x, weight, bias = rows_and_weights()
    grad_y = torch.randn_like(x)
    wide = x.double()
    mean, rstd = wide.mean(-1).float(), (wide.var(-1, correction=0) + EPSILON).rsqrt().float()

    def gradients(which: int):
        def gradient(*inputs: Tensor) -> Tensor:
            *inputs, grad_y = inputs
            leaves = [t.detach().requires_grad_() for t in inputs]
            y = normalized(*leaves)
            # Each block sums the weights' gradients over its rows.
            of_blocks = [
                torch.autograd.grad(y[rows], leaves[which], grad_y[rows], retain_graph=True)[0]
                for rows in (slice(0, 2), slice(2, ROWS))
            ]
            return sum(of_blocks) if which == 0 else torch.stack(of_blocks)

        return gradient

    inputs = x, weight, bias, grad_y
    return Launch(
        "liger_kernel.ops.layer_norm:_layer_norm_backward_kernel",
        (2,),
        {
            "X_ptr": x,
            "stride_x": COLUMNS,
            "W_ptr": weight,
            "Mean_ptr": mean,
            "stride_mean": 1,
            "RSTD_ptr": rstd,
            "stride_rstd": 1,
            "DX_ptr": torch.empty_like(x),
            "stride_dx": COLUMNS,
            "DW_ptr": torch.empty(2, COLUMNS),
            "stride_dw": COLUMNS,
            "DB_ptr": torch.empty(2, COLUMNS),
            "stride_db": COLUMNS,
            "DY_ptr": grad_y,
            "stride_dy": COLUMNS,
            "n_rows": ROWS,
            "n_cols": COLUMNS,
            "rows_per_program": 2,
            "BLOCK_SIZE": BLOCK,
            "COMPUTE_DW": True,
            "COMPUTE_DB": True,
        },
        {
            "DX_ptr": computed(gradients(0), *inputs),
            "DW_ptr": both(gradients(1), *inputs),
            "DB_ptr": both(gradients(2), *inputs),
        },
    )


def rms_norm_forward() -> Launch:
    x, weight, _ = rows_and_weights()
    y = torch.empty_like(x)

    def scaled(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (COLUMNS,), weight, EPSILON)

    return Launch(
        "liger_kernel.ops.rms_norm:_rms_norm_forward_kernel",
        (ROWS,),
        {
            "Y_ptr": y,
            "Y_row_stride": COLUMNS,
            "X_ptr": x,
            "X_row_stride": COLUMNS,
            "W_ptr": weight,
            "W_row_stride": 1,
            "RSTD_ptr": torch.empty(ROWS),
            "RSTD_row_stride": 1,
            "n_cols": COLUMNS,
            "eps": EPSILON,
            "offset": 0.0,
            "casting_mode": 1,  # as in Gemma: all arithmetic in float32
            "elementwise_affine": True,
            "BLOCK_SIZE": BLOCK,
        },
        {
            "Y_ptr": computed(scaled, x, weight),
            "RSTD_ptr": both(lambda x: ((x * x).mean(-1) + EPSILON).rsqrt(), x),
        },
    )


def cross_entropy() -> Launch:
    """The loss and, in place, its gradient, with an ignored target and smoothed labels."""
    rows, smoothing = 4, 0.1
    logits = torch.randn(rows, COLUMNS, dtype=BF16) * 2
    targets = torch.randint(COLUMNS, (rows,))
    targets[2] = -100
    kept = (targets >= 0).sum().item()

    def losses(x: Tensor) -> Tensor:
        return F.cross_entropy(x, targets, label_smoothing=smoothing, reduction="none") / kept

    def gradient(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(losses(leaf).sum(), leaf)[0]

    expected = {"X_ptr": computed(gradient, logits), "loss_ptr": both(losses, logits)}
    unused = "weight_ptr", "z_loss_ptr", "token_accuracy_ptr", "predicted_tokens_ptr", "softcap"
    returned = "RETURN_Z_LOSS", "RETURN_TOKEN_ACCURACY", "RETURN_PREDICTED_TOKENS"
    return Launch(
        "liger_kernel.ops.cross_entropy:liger_cross_entropy_kernel",
        (rows,),
        {
            **dict.fromkeys(unused),
            **dict.fromkeys(returned, False),
            "HAS_WEIGHT": False,
            "HAS_SOFTCAPPING": False,
            "X_ptr": logits,
            "X_stride": COLUMNS,
            "Y_ptr": targets,
            "Y_stride": 1,
            "loss_ptr": torch.zeros(rows),
            "loss_stride": 1,
            "token_accuracy_stride": 0,
            "predicted_tokens_stride": 0,
            "n_cols": COLUMNS,
            "n_non_ignore": kept,
            "sum_non_ignore_weight": float(kept),
            "weight_sum": 0.0,
            "ignore_index": -100,
            "lse_square_scale": 0.0,
            "label_smoothing": smoothing,
            "reduction": "mean",
            "BLOCK_SIZE": 512,  # two blocks of columns
            "HAS_GRADIENTS": True,
        },
        expected,
        {"num_warps": 8},
    )


def rows_and_weights() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(ROWS, COLUMNS, dtype=BF16) + 0.5
    return x, torch.rand(COLUMNS, dtype=BF16), torch.rand(COLUMNS, dtype=BF16)


def normalized(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (COLUMNS,), weight, bias, EPSILON)


def computed(function, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The result in float64, and in float32 rounded to the inputs' dtype."""
    exact, plain = both(function, *inputs)
    return exact, plain.to(inputs[0].dtype)


def both(function, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The result in float64 and in float32."""
    return tuple(function(*(t.to(kind) for t in inputs)) for kind in (torch.double, torch.float32))
