"""One step of decoding against what memory can do, against SDPA, and with keys left out."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from biased_flash_attn import KVCache, biased_flash_attn, biased_flash_attn_with_kvcache, biases
from measure import alternate, seconds

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
CHUNK = 64
ROUNDS = 31
MAKE = {"no bias": lambda: None, "alibi": lambda: biases.ALiBi(HEADS)}
WHERE = f"H = {HEADS}, Hkv = {KV_HEADS}, D = {HEAD_DIM}"


class Decoder:
    """A cache of normal keys, and steps that append tokens to it and attend to all."""

    def __init__(self, bias: str, length: int, tokens: int = 1, tolerance: float | None = 0.0):
        generator = torch.Generator().manual_seed(0)

        def normal(heads: int, n: int) -> Tensor:
            return torch.randn(1, heads, n, HEAD_DIM, generator=generator).bfloat16()

        self.length, self.tokens, self.tolerance = length, tokens, tolerance
        self.first = length - CHUNK
        self.q = normal(HEADS, CHUNK)
        self.k, self.v = normal(KV_HEADS, length), normal(KV_HEADS, length)
        self.bias = MAKE[bias]()
        self.cache = KVCache(1, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        self.append(self.q[:, :, :0], slice(0, self.first))

    def append(self, q: Tensor, tokens: slice) -> Tensor:
        k, v = self.k[:, :, tokens], self.v[:, :, tokens]
        return biased_flash_attn_with_kvcache(
            q, self.cache, k, v, self.bias, tolerance=self.tolerance, backend="cpu"
        )

    def __call__(self) -> Tensor:
        """The next step; after that of the last token, the first of CHUNK tokens again."""
        (now,) = self.cache.lengths
        if now == self.length:
            now = self.first
            self.cache.truncate(now)
        end = now + self.tokens
        return self.append(self.q[:, :, now - self.first : end - self.first], slice(now, end))

    def steps(self) -> Tensor:
        """What all steps give."""
        return torch.cat([self() for _ in range(CHUNK // self.tokens)], 2)

    def whole(self) -> Tensor:
        """What one call over the whole sequence gives for the same queries."""
        return biased_flash_attn(self.q, self.k, self.v, self.bias, tolerance=self.tolerance)

    def check(self) -> None:
        """Fails when a step differs by more than roundings from exact attention."""
        q, k, v = (x.double() for x in (self.q, self.k, self.v))
        exact = biased_flash_attn(q, k, v, self.bias, backend="reference")
        error = (self.steps() - exact).abs().max()
        assert error <= 8 * torch.finfo(torch.bfloat16).eps * v.abs().max()


@pytest.fixture
def context(length) -> int:
    return 8 * length


@pytest.mark.parametrize("bias", MAKE)
def test_share_of_copy_bandwidth(benchmark, record, context, bias):
    """The bytes of keys and values a second, in percent of the bytes read and written by a copy."""
    Decoder(bias, 330).check()
    step = Decoder(bias, context)
    stored = torch.stack([step.k, step.v])
    target = torch.empty_like(stored)
    mine, theirs = alternate(benchmark, step, seconds(lambda: target.copy_(stored)), ROUNDS)
    shares = [100 * t / (2 * m) for m, t in zip(mine, theirs, strict=True)]
    work = f"decoding at {context}, {bias}: bytes/s against a copy's, {WHERE}"
    record(work, "bfloat16", shares, " %", ">=", 70, mine, theirs)


def test_against_sdpa(benchmark, record, context):
    """SDPA is given the same keys, with the bias as a mask that was made before."""
    Decoder("alibi", 330).check()
    step = Decoder("alibi", context)
    mask = step.bias.dense(1, context)[None].bfloat16()

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(
            step.q[:, :, -1:], step.k, step.v, attn_mask=mask, enable_gqa=True
        )

    torch.testing.assert_close(sdpa(), step.steps()[:, :, -1:], rtol=0, atol=0.05)
    mine, theirs = alternate(benchmark, step, seconds(sdpa), 9)
    ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
    work = f"decoding at {context}, alibi against SDPA with a dense bias, {WHERE}"
    record(work, "bfloat16", ratios, "x", ">=", 2, mine, theirs)


def test_leaving_out_keys(benchmark, record, context):
    whole, step = Decoder("alibi", context), Decoder("alibi", context, tolerance=None)
    torch.testing.assert_close(step.steps(), whole.steps(), rtol=0, atol=0.02)
    mine, theirs = alternate(benchmark, step, seconds(whole), ROUNDS)
    ratios = [t / m for m, t in zip(mine, theirs, strict=True)]
    work = f"decoding at {context}, alibi against itself at tolerance 0, {WHERE}"
    record(work, "bfloat16", ratios, "x", ">=", 4, mine, theirs)


@pytest.mark.parametrize("bias", MAKE)
def test_chunk(benchmark, record, length, bias):
    """Several tokens a step, against the ordinary call on keys that are contiguous."""
    Decoder(bias, 330, CHUNK).check()
    step = Decoder(bias, length, CHUNK)
    mine, theirs = alternate(benchmark, step, seconds(step.whole), ROUNDS)
    ratios = [m / t for m, t in zip(mine, theirs, strict=True)]
    work = f"{CHUNK} tokens at {length}, {bias} against the ordinary call, {WHERE}"
    record(work, "bfloat16", ratios, "x", "<=", 1.2, mine, theirs)
