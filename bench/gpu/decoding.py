"""A decoding step on a GPU compared with memory bandwidth and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from bench.common.decoder import CHECKED_LENGTH, CHUNK, MAKE, Decoder
from bench.common.measure import in_turn
from bench.gpu.comparisons import Aim, Case
from bench.gpu.device import Gpu
from bench.reports.results import Row

AIM = Aim("a step of decoding: bytes/s against those of a copy", ">=", 80)


class Decoding:
    """Every bias and batch, at one length. Measured like a `case.Measurement`."""

    def __init__(self, case: Case, device: Gpu):
        self.case, self.device = case, device

    def decoder(self, bias: str, batch: int, length: int) -> Decoder:
        heads, where = self.device.decoding_heads, {"device": self.device.name, "backend": "triton"}
        return Decoder(bias, length, heads, self.case.head_dim, batch=batch, **where)

    def prepare(self) -> None:
        """Fails if our results are wrong."""
        for bias in MAKE:
            self.decoder(bias, 2, CHECKED_LENGTH).check()
        self.device.release()

    def rows(self) -> Iterator[Row]:
        for batch, bias in product(self.device.decoding_batches, MAKE):
            step = self.decoder(bias, batch, self.case.length)
            yield self.against_copy(step, f"{self.case}, batch {batch}, {bias}")
            yield self.against_flex(step, f"{self.case}, batch {batch}, {bias}")
            del step
            self.device.release()

    def against_copy(self, step: Decoder, work: str) -> Row:
        stored = torch.stack([step.k, step.v])
        target = torch.empty_like(stored)
        mine, other = in_turn(step, lambda: target.copy_(stored), self.device)
        # A copy reads and writes every byte.
        percentages = [100 * o / (2 * m) for m, o in zip(mine, other, strict=True)]
        work = f"{work}: bytes/s against a copy's"
        return Row(
            work, "bfloat16", percentages, " %", AIM.comparison, AIM.target, mine, other, AIM.name
        )

    def against_flex(self, step: Decoder, work: str) -> Row:
        other = flex_step(step, self.device.compiled)
        error = (other() - step.last()).abs().max().item()
        assert error <= 0.05, f"the result of FlexAttention differs by {error:.2g}"
        mine, others = in_turn(step, other, self.device)
        ratios = [o / m for m, o in zip(mine, others, strict=True)]
        work = f"{work} against FlexAttention"
        return Row(work, "bfloat16", ratios, "x", None, None, mine, others)


def flex_step(step: Decoder, compiled: Callable) -> Callable[[], Tensor]:
    """The same step with FlexAttention, on contiguous keys and without appending."""
    slopes = None if step.bias is None else step.bias.lower(None, torch.float32, step.q.device)
    last = step.length - 1

    @compiled
    def attention(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None) -> Tensor:
        def alibi(score, b, h, i, j):
            return score - slopes[h] * (last - j)

        score_mod = None if slopes is None else alibi
        return flex_attention(q, k, v, score_mod, enable_gqa=True)

    q = step.q[:, :, CHUNK - 1 :]
    return lambda: attention(q, step.k, step.v, None if slopes is None else slopes.slopes[0])
