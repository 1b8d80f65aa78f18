"""The problems that `check` computes: every form, in every kind of call.

The numbers of a problem depend on the seed, the sizes and whether the dtype has 16 bits, but not on
the device. bfloat16 and float16 use the same numbers, which both represent exactly, and so have the
same float64 result.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from ... import biases

BATCH, HEADS, KV_HEADS = 2, 4, 2
# Tokens of each step: an ordinary step, and one with four draft tokens.
DECODING_STEPS = (1, 5)
FORMS = ("none", "linear", "distance", "cumulative", "cumulative with gain", "log1p_square")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Call:
    """A kind of call; kernels are compiled for each head_dim."""

    name: str
    head_dim: int

    def __str__(self) -> str:
        return f"{self.name}, D = {self.head_dim}"

    @property
    def causal(self) -> bool:
        return self.name != "bidirectional"


CALLS = (
    Call("causal", 64),
    Call("causal", 128),
    Call("packed", 128),
    Call("decoding", 128),
    Call("bidirectional", 64),
)


class Table(biases.DistanceBias):
    """A different number for each signed distance, (heads, 2 reach + 1), which reveals shifts."""

    def __init__(self, table: nn.Parameter):
        super().__init__(len(table))
        self.reach = table.shape[1] // 2
        self.table = table

    def formula(self, d: Tensor) -> Tensor:
        return self.table.double()[:, d.long() + self.reach]


@dataclass(frozen=True)
class Problem:
    """A call with its numbers.

    leaves: q (B, H, N, D), k and v (B, Hkv, N, D), and the tensors of the bias: slopes (H,), table
        (H, distances), steps and gain (B, H, N).
    grad_o, grad_lse: the gradient of a loss with respect to the results.
    sequences: the batch entry and the rows of each sequence.
    """

    form: str
    call: Call
    leaves: dict[str, Tensor]
    grad_o: Tensor
    grad_lse: Tensor
    sequences: tuple[tuple[int, Tensor], ...]

    def to(self, dtype: torch.dtype) -> Problem:
        """The same numbers in dtype; tensors of the bias are float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        leaves = {
            name: nn.Parameter(x.detach().to(dtype if name in ("q", "k", "v") else wide))
            for name, x in self.leaves.items()
        }
        grads = self.grad_o.to(dtype), self.grad_lse.to(wide)
        return Problem(self.form, self.call, leaves, *grads, self.sequences)

    def bias(self, tokens: slice = slice(None)):
        """The bias that a user would pass with these tokens."""
        if self.form == "none":
            return None
        if self.form == "linear":
            bias = biases.ALiBi(HEADS, trainable=True)
            bias.slopes = self.leaves["slopes"]
            return bias
        if self.form == "distance":
            return Table(self.leaves["table"])
        gain = self.leaves.get("gain")
        return biases.CumulativeBias(
            self.leaves["steps"][..., tokens],
            None if gain is None else gain[..., tokens],
            "log1p_square" if self.form == "log1p_square" else None,
        )


def draw(form: str, call: Call, length: int, dtype: torch.dtype, seed: int, device: str) -> Problem:
    """The problem in float64, with numbers that dtype represents exactly."""
    half = dtype.itemsize == 2
    name = f"{seed} {form} {call} {length} {half}"
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def rounded(*shape: int) -> Tensor:
        x = normal(*shape)
        return x.bfloat16().half().float() if half else x

    sequences, (batch, tokens) = sequences_of(call, length)
    rows = batch, HEADS, tokens
    leaves = {
        "q": rounded(*rows, call.head_dim),
        "k": rounded(batch, KV_HEADS, tokens, call.head_dim),
        "v": rounded(batch, KV_HEADS, tokens, call.head_dim),
    }
    # The range increases from head to head, up to the whole sequence in the last head.
    head = torch.arange(1, HEADS + 1)
    if form == "linear":
        leaves["slopes"] = 2.0 ** (-2 * head) * (1 + 0.1 * normal(HEADS))
    elif form == "distance":
        d = torch.arange(1 - length, length)
        leaves["table"] = -torch.log1p(d.abs()) + 0.3 * normal(HEADS, len(d))
    elif form != "none":
        leaves["steps"] = -(10.0 ** (-head[:, None])) * softplus(normal(*rows))
        if form != "cumulative":
            leaves["gain"] = softplus(normal(*rows))
    grads = rounded(*rows, call.head_dim), normal(*rows)
    numbers = {name: x.to(device) for name, x in leaves.items()}
    sequences = tuple((entry, index.to(device)) for entry, index in sequences)
    problem = Problem(form, call, numbers, *(x.to(device) for x in grads), sequences)
    return problem.to(torch.float64)


def sequences_of(call: Call, length: int) -> tuple[tuple[tuple[int, Tensor], ...], tuple[int, int]]:
    """The sequences of a call, the number of batch entries and their number of tokens."""
    if call.name == "packed":
        lengths = [length - 3, 1, length // 4 + 1]
        lengths.append(BATCH * length - sum(lengths))
        each = torch.arange(BATCH * length).split(lengths)
        return tuple((0, rows) for rows in each), (1, BATCH * length)
    if call.name == "decoding":
        # Some tokens of the last sequence are dropped before the steps.
        prompt = length - sum(DECODING_STEPS)
        rows = torch.arange(length)
        shorter = torch.cat([rows[: prompt - dropped(length)], rows[prompt:]])
        return ((0, rows), (1, shorter)), (BATCH, length)
    # Triton specializes kernels for lengths that are multiples of 16.
    tokens = length if call.causal else length - 5
    return tuple((b, torch.arange(tokens)) for b in range(BATCH)), (BATCH, tokens)


def dropped(length: int) -> int:
    """The number of tokens that the last sequence drops before it is decoded."""
    return length // 8 + 3
