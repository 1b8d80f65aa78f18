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
from torch.nn.functional import pad

from .checked_form import KEYS, QUERIES, TOKENS, CheckedForm, Numbers, Tensors
from .forms import FORMS

BATCH, HEADS, KV_HEADS = 2, 4, 2
# Tokens of each step: an ordinary step, and one with four draft tokens.
DECODING_STEPS = (1, 5)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INPUTS = ("q", "k", "v")
LEFT_OUT = "other head_dims and tolerances than those of these calls, windows, context parallelism"


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


@dataclass(frozen=True)
class Problem:
    """A call with its numbers.

    leaves: q (B, H, N, D), k and v (B, Hkv, N, D), and the tensors of the bias.
    grad_o, grad_lse: the gradient of a loss with respect to the results.
    sequences: the batch entry and the rows of each sequence.
    """

    form: CheckedForm
    call: Call
    leaves: Tensors
    grad_o: Tensor
    grad_lse: Tensor
    sequences: tuple[tuple[int, Tensor], ...]

    def to(self, dtype: torch.dtype) -> Problem:
        """The same numbers in dtype; some tensors of biases are float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        dtype_of_bias = dtype if self.form.has_dtype_of_q else wide
        leaves = {
            name: nn.Parameter(x.detach().to(dtype if name in INPUTS else dtype_of_bias))
            for name, x in self.leaves.items()
        }
        grads = self.grad_o.to(dtype), self.grad_lse.to(wide)
        return Problem(self.form, self.call, leaves, *grads, self.sequences)

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        q, k, v = (self.leaves[name] for name in INPUTS)
        return q, k, v

    @property
    def tensors(self) -> Tensors:
        """The tensors of the bias."""
        return {name: x for name, x in self.leaves.items() if name not in INPUTS}

    def bias(self):
        """The bias that a user would pass."""
        return self.form.bias(self.tensors)

    def bias_of_step(self, first: int, end: int):
        """The bias that a user would pass in decoding with the tokens first, ..., end - 1."""
        tokens = torch.arange(end, device=self.grad_o.device)
        keys = [rows[rows < end] if first else tokens for _, rows in self.sequences]
        tensors, longest, each = self.tensors, max(map(len, keys)), []
        for b, rows in enumerate(keys):
            # What follows the keys of a shorter sequence is not read.
            new, cached = tokens[first:], pad(rows, (0, longest - len(rows)))
            own = {TOKENS: new, QUERIES: new, KEYS: cached}
            each.append(self.form.selected(tensors, b, **own))
        joined = {name: torch.cat([one[name] for one in each]) for name in self.form.axes}
        return self.form.bias(tensors | joined)


def draw(form: str, call: Call, length: int, dtype: torch.dtype, seed: int, device: str) -> Problem:
    """The problem in float64, with numbers that dtype represents exactly."""
    checked = FORMS[form]
    length = min(length, checked.longest)
    half = dtype.itemsize == 2
    name = f"{seed} {form} {call} {length} {half}"
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    sequences, (batch, tokens) = sequences_of(call, length)
    rows = batch, HEADS, tokens
    numbers = Numbers(generator, rows, length, half)

    def rounded(*shape: int) -> Tensor:
        return numbers.rounded(numbers.normal(*shape))

    leaves = {
        "q": rounded(*rows, call.head_dim),
        "k": rounded(batch, KV_HEADS, tokens, call.head_dim),
        "v": rounded(batch, KV_HEADS, tokens, call.head_dim),
        **checked.draw(numbers),
    }
    is_smooth = torch.ones(batch, 1, tokens, dtype=torch.bool)
    for entry, index in sequences:
        is_smooth[entry, :, index] = checked.is_smooth(leaves, torch.arange(len(index)))
    grad_o, grad_lse = rounded(*rows, call.head_dim), numbers.normal(*rows)
    grads = grad_o * is_smooth[..., None], grad_lse * is_smooth
    leaves = {name: x.to(device) for name, x in leaves.items()}
    sequences = tuple((entry, index.to(device)) for entry, index in sequences)
    problem = Problem(checked, call, leaves, *(x.to(device) for x in grads), sequences)
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
