"""Times a form and PyTorch's alternatives for the same attention.

A backward pass is timed together with its forward pass, as compiled code does not permit to retain
the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ... import biased_flash_attn
from ...forms import Geometry
from ..clock import CpuClock, GpuClock, medians
from ..flex import captured, score_mod
from .accuracy import described
from .oracle import dense_bias
from .problems import BATCH, HEADS, KV_HEADS, Call, Problem, draw

OURS, PLAIN, DENSE, FLEX = "ours", "SDPA, no bias", "SDPA, dense bias", "FlexAttention"
SECONDS = 0.5  # for the rounds of each pass, but at least three rounds
# Alternatives compute in a different order and may round weights; larger differences are errors.
MAX_DIFFERENCE = 0.05
FORWARD_ONLY = "no backward pass on CPUs"
NOT_COMPILED = "not compiled, as that would take too long"


@dataclass(frozen=True)
class Timing:
    """Median seconds by side, forward alone and with backward; notes on limitations of a side."""

    form: str
    forward: dict[str, float]
    training: dict[str, float]
    notes: dict[str, str]


@dataclass(frozen=True)
class Side:
    """One implementation of attention, with the leaves that it differentiates."""

    attend: Callable[[], Tensor]
    leaves: tuple[Tensor, ...] = ()


class Race:
    """A form and its peers on one causal problem with equal numbers of query and key heads."""

    def __init__(
        self,
        form: str,
        length: int,
        head_dim: int,
        dtype: torch.dtype,
        seed: int,
        device: str,
        backend: str,
    ):
        drawn = draw(form, Call("causal", head_dim), length, dtype, seed, device).to(dtype)
        wider = {
            name: nn.Parameter(drawn.leaves[name].detach().repeat_interleave(HEADS // KV_HEADS, 1))
            for name in ("k", "v")
        }
        self.problem = replace(drawn, leaves={**drawn.leaves, **wider})
        self.backend, self.on_gpu = backend, drawn.grad_o.is_cuda
        self.clock = GpuClock() if self.on_gpu else CpuClock()
        self.notes: dict[str, str] = {}
        self.sides: dict[str, Side] = {}

    def prepare(self, with_flex: bool = True) -> None:
        """Creates, compiles and runs all sides once, and records those that fail."""
        self.sides[OURS] = self.ours()
        expected = self.sides[OURS].attend().detach()
        peers = {PLAIN: self.plain, DENSE: self.dense}
        if with_flex:
            peers[FLEX] = self.flex
        else:
            self.notes[FLEX] = NOT_COMPILED
        for name, make in peers.items():
            try:
                side = make()
                found = side.attend().detach()
                if side.leaves:
                    gradients(side, self.problem.grad_o)
            except RuntimeError as error:  # a peer that fails does not fail the check
                self.notes[name] = described(error)
                continue
            self.sides[name] = side
            if name != PLAIN or self.problem.bias() is None:
                difference = float((found - expected).float().norm() / expected.float().norm())
                if not difference <= MAX_DIFFERENCE:
                    self.notes[name] = f"its output differs by {difference:.1%}"

    def timing(self) -> Timing:
        sides = self.sides.items()
        # With torch.no_grad() FlexAttention would be compiled again.
        forward = medians({name: side.attend for name, side in sides}, self.clock, SECONDS)
        training = {
            name: partial(gradients, side, self.problem.grad_o)
            for name, side in sides
            if side.leaves
        }
        training = medians(training, self.clock, SECONDS)
        self.clock.release()
        return Timing(self.problem.form.name, forward, training, self.notes)

    def ours(self) -> Side:
        qkv, bias = self.problem.inputs, self.problem.bias()
        return Side(
            lambda: biased_flash_attn(*qkv, bias, backend=self.backend),
            tuple(self.problem.leaves.values()),
        )

    def plain(self) -> Side:
        qkv = self.problem.inputs
        return Side(lambda: F.scaled_dot_product_attention(*qkv, is_causal=True), qkv)

    def dense(self) -> Side:
        qkv, mask = self.problem.inputs, dense_mask(self.problem)
        return Side(lambda: F.scaled_dot_product_attention(*qkv, attn_mask=mask), qkv)

    def flex(self) -> Side:
        q, k, v = self.problem.inputs
        n, device, bias = q.shape[2], q.device, self.problem.bias()
        block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=device)

        @torch.compile(dynamic=False, fullgraph=True)
        def attend(q, k, v, form, numbers):
            return flex_attention(q, k, v, score_mod(form, *numbers), block_mask)

        def lowered():
            return captured(bias and bias.lower(Geometry(n, n), torch.float32, device))

        if not self.on_gpu:
            self.notes[FLEX] = FORWARD_ONLY
            # Tensors of the bias must not require gradients either (torch 2.13).
            form, numbers = lowered()
            numbers = [x if x is None else x.detach() for x in numbers]
            return Side(lambda: attend(q.detach(), k.detach(), v.detach(), form, numbers))
        return Side(lambda: attend(q, k, v, *lowered()), tuple(self.problem.leaves.values()))


def dense_mask(problem: Problem) -> Tensor:
    """The bias of every pair in q's dtype, (1 or B, H, N, N), with -inf where a key is masked."""
    q = problem.leaves["q"]
    n = q.shape[2]
    # A bias without values per token is that of all batch entries.
    mask = q.new_empty(BATCH if problem.form.axes else 1, HEADS, n, n)
    rows = torch.arange(n, device=q.device)
    with torch.no_grad():
        for entry, entry_mask in enumerate(mask):
            for first in range(0, n, problem.form.block):
                block = slice(first, min(first + problem.form.block, n))
                bias = dense_bias(problem, entry, rows, block, n)
                entry_mask[:, block] = 0 if bias is None else bias[0]
                entry_mask[:, block].masked_fill_(rows[block, None] < rows, -torch.inf)
    return mask


def gradients(side: Side, grad_o: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(side.attend(), side.leaves, grad_o)
