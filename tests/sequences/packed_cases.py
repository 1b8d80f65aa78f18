"""Problems whose rows belong to several packed or padded sequences, and how they are checked.

The expected result is that of one dense problem over all rows, whose mask separates sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from biased_flash_attn import biased_flash_attn, biased_flash_attn_varlen, biases
from biased_flash_attn.forms import Geometry, Linear
from tests.support.biases import FreePieces, SlopesOfSequences, of_rows
from tests.support.cases import Case
from tests.support.problems import Problem, drawn

Lengths = tuple[tuple[int, int], ...]  # queries and keys of each sequence


@dataclass(frozen=True)
class PackedGeometry(Geometry):
    own: tuple[Geometry, ...] = ()

    def visible(self, device=None) -> Tensor:
        return torch.block_diag(*(one.visible(device) for one in self.own)).bool()


@dataclass(frozen=True)
class PackedCase(Case):
    """Sequences in one batch entry, one after the other."""

    batch: int = 1
    sequences: Lengths = ((70, 70),)

    @staticmethod
    def of(sequences: Lengths, **settings) -> PackedCase:
        totals = tuple(map(sum, zip(*sequences, strict=True)))
        return PackedCase(lengths=totals, sequences=sequences, **settings)

    def __str__(self) -> str:
        lengths = "+".join(f"{n_query}x{n_key}" for n_query, n_key in self.sequences)
        return f"{super().__str__()}-{lengths}"

    @property
    def geometry(self) -> Geometry:
        own = tuple(Geometry(*lengths, self.causal, self.window) for lengths in self.sequences)
        return PackedGeometry(*self.lengths, self.causal, self.window, own=own)

    def offsets(self) -> tuple[Tensor, Tensor]:
        queries, keys = zip(*self.sequences, strict=True)
        return tuple(
            torch.tensor([0, *itertools.accumulate(side)], dtype=torch.int32)
            for side in (queries, keys)
        )


class PackedProblem(Problem):
    def dense(self) -> Tensor | None:
        """The bias of every pair, in blocks."""
        if self.bias is None:
            return None
        blocks = []
        for (n_query, n_key), (own, i, j) in zip(self.case.sequences, self.parts(), strict=True):
            below, right = self.case.lengths[0] - i - n_query, self.case.lengths[1] - j - n_key
            block = dense_of(own, n_query, n_key, self.grad_lse.dtype)
            blocks.append(pad(block, (j, right, i, below)))
        return sum(blocks)

    def parts(self) -> Iterator[tuple[object, int, int]]:
        """Each sequence's bias, its first query and its first key."""
        bias, i, j = self.called_bias(), 0, 0
        for b, (n_query, n_key) in enumerate(self.case.sequences):
            own = bias
            if isinstance(bias, SlopesOfSequences):
                own = Linear(bias.slopes[b : b + 1])
            elif isinstance(bias, biases.CumulativeBias):
                steps, gain = bias.steps[..., j : j + n_key], bias.gain
                gain = None if gain is None else gain[..., i : i + n_query]
                own = biases.CumulativeBias(steps, gain, bias.kernel)
            elif isinstance(bias, biases.DenseBias):
                own = biases.DenseBias(bias.tensor[..., i : i + n_query, j : j + n_key])
            elif isinstance(bias, biases.RelativeBias):
                own = of_rows(bias, slice(i, i + n_query), slice(j, j + n_key))
            yield own, i, j
            i, j = i + n_query, j + n_key


def dense_of(bias, n_query: int, n_key: int, real: torch.dtype) -> Tensor:
    """(B or 1, H, n_query, n_key) in float64; steps are summed in lse's precision."""
    geometry = Geometry(n_query, n_key, causal=False)
    if isinstance(bias, Linear):
        return bias.dense(geometry)
    if not isinstance(bias, biases.CumulativeBias):
        dense = bias.dense(n_query, n_key)
        return dense if dense.dim() == 4 else dense[None]
    form = bias.lower(geometry, real, bias.steps.device)
    return replace(form, sums=form.sums.to(real)).dense(geometry)


def drawn_packed(case: PackedCase) -> PackedProblem:
    problem = drawn(case)
    if case.bias == "linear-batch":
        slopes = SlopesOfSequences(len(case.sequences), case.heads[0])
        problem.bias = slopes.to(problem.grad_lse.dtype)
    return PackedProblem(**vars(problem))


def packed(problem: PackedProblem, backend: str = "cpu", **options) -> tuple[Tensor, Tensor]:
    """The results of the packed call, with heads before rows."""
    case = problem.case
    o, lse = biased_flash_attn_varlen(
        *(x[0].transpose(0, 1) for x in (problem.q, problem.k, problem.v)),
        *case.offsets(),
        problem.called_bias(),
        causal=case.causal,
        window=case.window,
        scale=case.scale,
        return_lse=True,
        backend=backend,
        **options,
    )
    return o.transpose(0, 1)[None], lse[None]


@dataclass(frozen=True)
class PaddedGeometry(Geometry):
    mask: Tensor | None = None

    def visible(self, device=None) -> Tensor:
        positions = self.positions(device)
        exists = (positions >= 0) & (positions < self.n_key)
        is_token = self.mask[:, positions.clamp(0, max(0, self.n_key - 1))] & exists
        return super().visible(device) & (is_token[:, :, None] & self.mask[:, None])[:, None]


@dataclass(frozen=True)
class PaddedCase(Case):
    """Sequence b is padded by padding[b] = (before, after) of the keys."""

    padding: Lengths = ((0, 0), (0, 0))

    def __str__(self) -> str:
        return f"{super().__str__()}-" + "+".join("{}and{}".format(*pair) for pair in self.padding)

    @property
    def mask(self) -> Tensor:
        j, n_key = torch.arange(self.lengths[1]), self.lengths[1]
        before, after = torch.tensor(self.padding).T
        return (j >= before[:, None]) & (j < n_key - after[:, None])

    @property
    def geometry(self) -> Geometry:
        return PaddedGeometry(*self.lengths, self.causal, self.window, mask=self.mask)


class PaddedProblem(Problem):
    def dense(self) -> Tensor | None:
        """The bias of all slots; padding has no steps, and biases that depend on positions count
        them from the first token."""
        if self.bias is None:
            return None
        bias, (n_query, n_key) = self.called_bias(), self.case.lengths
        if isinstance(bias, biases.CumulativeBias):
            steps = torch.where(self.case.mask[:, None], bias.steps, 0)
            bias = biases.CumulativeBias(steps, bias.gain, bias.kernel)
        if isinstance(bias, FreePieces):
            return torch.cat([bias.dense(n_query, n_key, n) for n, _ in self.case.padding])
        return dense_of(bias, n_query, n_key, self.grad_lse.dtype)


def drawn_padded(case: PaddedCase) -> PaddedProblem:
    return PaddedProblem(**vars(drawn(case)))


def padded(problem: PaddedProblem, backend: str = "cpu", **options) -> tuple[Tensor, Tensor]:
    case = problem.case
    return biased_flash_attn(
        problem.q,
        problem.k,
        problem.v,
        problem.called_bias(),
        key_padding_mask=case.mask,
        causal=case.causal,
        window=case.window,
        scale=case.scale,
        return_lse=True,
        backend=backend,
        **options,
    )
