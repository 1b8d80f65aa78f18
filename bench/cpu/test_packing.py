"""Packed sequences: of different lengths, compared with the same sequences one by one."""

import pytest
import torch
from torch import Tensor

from bench.common.correctness import check
from bench.common.implementations import make_bias, ours
from bench.common.layer import Inputs, Training, draw
from bench.common.measure import alternate, seconds
from biased_flash_attn import biased_flash_attn_varlen

# Lengths as fractions of the total.
FRACTIONS = [0.35, 0.22, 0.15, 0.11, 0.08, 0.05, 0.03, 0.01]
ROUNDS = 15


def cut(length: int) -> list[int]:
    lengths = [round(fraction * length) for fraction in FRACTIONS]
    return [length - sum(lengths[1:]), *lengths[1:]]


def one_by_one(inputs: Inputs, lengths: list[int], bias: str | None):
    """A forward and backward pass for each sequence, on separate tensors."""
    calls, begin = [], 0
    for n in lengths:
        rows = slice(begin, begin + n)
        q, k, v = (
            x[:, :, rows].detach().contiguous().requires_grad_()
            for x in (inputs.q, inputs.k, inputs.v)
        )
        own = Inputs(q, k, v, inputs.x[:, rows], inputs.grad_o[:, :, rows].contiguous())
        calls.append(ours(own, bias))
        begin += n

    def run() -> list[dict[str, Tensor]]:
        return [call() for call in calls]

    return run


def packed(inputs: Inputs, lengths: list[int], bias: str | None) -> Training:
    module = make_bias(bias, inputs)
    q, k, v = (
        x[0].transpose(0, 1).detach().contiguous().requires_grad_()
        for x in (inputs.q, inputs.k, inputs.v)
    )
    grad_o = inputs.grad_o[0].transpose(0, 1).contiguous()
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()

    def attend() -> Tensor:
        form = module and module(inputs.x)
        return biased_flash_attn_varlen(q, k, v, offsets, offsets, form, backend="cpu")

    return Training(Inputs(q, k, v, inputs.x, grad_o), attend, module)


def check_packed(bias: str | None, dtype: torch.dtype) -> None:
    """Fails if the results of packed sequences differ from those of separate calls."""
    lengths = cut(330)
    inputs = draw(330, dtype)
    whole = packed(inputs, lengths, bias)()["o"]
    apart = [one["o"][0].transpose(0, 1) for one in one_by_one(inputs, lengths, bias)()]
    torch.testing.assert_close(whole, torch.cat(apart), rtol=0, atol=64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [None, "alibi", "kerple_log", "cable", "kernelized_cable"])
def test_cost_of_packing(benchmark, record, length, bias, dtype):
    torch_dtype = getattr(torch, dtype)
    check(bias, torch_dtype)
    check_packed(bias, torch_dtype)
    lengths = cut(length)
    inputs = draw(length, torch_dtype)
    apart = seconds(one_by_one(inputs, lengths, bias))
    together, alone = alternate(benchmark, packed(inputs, lengths, bias), apart, ROUNDS)
    ratios = [t / a for t, a in zip(together, alone, strict=True)]
    work = f"8 packed sequences against the same one by one, {bias or 'no bias'}"
    record(work, dtype, ratios, "x", "<=", 1.1, together, alone)
