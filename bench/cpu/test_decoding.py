"""Decoding: a step compared with memory bandwidth and SDPA, and with skipping."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bench.common.decoder import CHECKED_LENGTH, CHUNK, MAKE, Decoder
from bench.common.measure import alternate, seconds

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROUNDS = 31
WHERE = f"H = {HEADS}, Hkv = {KV_HEADS}, D = {HEAD_DIM}"


def decoder(bias: str, length: int, **options) -> Decoder:
    return Decoder(bias, length, (HEADS, KV_HEADS), HEAD_DIM, **options)


@pytest.fixture
def context(length) -> int:
    return 8 * length


@pytest.mark.parametrize("bias", MAKE)
def test_fraction_of_copy_bandwidth(benchmark, record, context, bias):
    """The bandwidth of keys and values, in percent of the bandwidth of a copy."""
    decoder(bias, CHECKED_LENGTH).check()
    step = decoder(bias, context)
    stored = torch.stack([step.k, step.v])
    target = torch.empty_like(stored)
    mine, theirs = alternate(benchmark, step, seconds(lambda: target.copy_(stored)), ROUNDS)
    percentages = [100 * t / (2 * m) for m, t in zip(mine, theirs, strict=True)]
    work = f"decoding at {context}, {bias}: bytes/s against a copy's, {WHERE}"
    record(work, "bfloat16", percentages, " %", ">=", 70, mine, theirs)


def test_against_sdpa(benchmark, record, context):
    """SDPA gets the same keys, with the bias as a precomputed mask."""
    decoder("alibi", CHECKED_LENGTH).check()
    step = decoder("alibi", context)
    mask = step.bias.dense(1, context)[None].bfloat16()

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(
            step.q[:, :, -1:], step.k, step.v, attn_mask=mask, enable_gqa=True
        )

    torch.testing.assert_close(sdpa(), step.last(), rtol=0, atol=0.05)
    mine, theirs = alternate(benchmark, step, seconds(sdpa), 9)
    ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
    work = f"decoding at {context}, alibi against SDPA with a dense bias, {WHERE}"
    record(work, "bfloat16", ratios, "x", ">=", 2, mine, theirs)


def test_skipping(benchmark, record, context):
    whole, step = decoder("alibi", context), decoder("alibi", context, tolerance=None)
    torch.testing.assert_close(step.last(), whole.last(), rtol=0, atol=0.02)
    mine, theirs = alternate(benchmark, step, seconds(whole), ROUNDS)
    ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
    work = f"decoding at {context}, alibi against itself at tolerance 0, {WHERE}"
    record(work, "bfloat16", ratios, "x", ">=", 4, mine, theirs)


@pytest.mark.parametrize("bias", MAKE)
def test_chunk(benchmark, record, length, bias):
    """Several tokens per step, compared with the ordinary call on contiguous keys."""
    decoder(bias, CHECKED_LENGTH, tokens=CHUNK).check()
    step = decoder(bias, length, tokens=CHUNK)
    mine, theirs = alternate(benchmark, step, seconds(step.whole), ROUNDS)
    ratios = [m / t for m, t in zip(mine, theirs, strict=True)]
    work = f"{CHUNK} tokens at {length}, {bias} against the ordinary call, {WHERE}"
    record(work, "bfloat16", ratios, "x", "<=", 1.2, mine, theirs)
