"""Problems whose queries are beyond the keys, and how they are checked.

The expected result is that of the dense problem over as many keys as positions, without those after
the last key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from biased_flash_attn import biases, operators
from biased_flash_attn.attention import attend, prepared
from biased_flash_attn.forms import Geometry, Linear
from biased_flash_attn.sequences import Sequences
from tests.sequences.packed_cases import dense_of
from tests.support.biases import FORMS, OF_QUERIES, SlopesOfSequences, of_rows
from tests.support.cases import Case
from tests.support.plans import kept_mask
from tests.support.problems import Problem, drawn


@dataclass(frozen=True)
class ShiftedGeometry(Geometry):
    shifts: tuple[int, ...] = ()
    plan: Tensor | None = None

    def visible(self, device=None) -> Tensor:
        lengths = self.n_query, self.n_key, self.causal, self.window
        each = [Geometry(*lengths, shift=shift).visible(device) for shift in self.shifts]
        visible = torch.stack(each)[:, None]
        return visible if self.plan is None else visible & kept_mask(self.plan, self)


@dataclass(frozen=True)
class ShiftedCase(Case):
    """The last query of entry b is shifts[b] positions after the last key."""

    shifts: tuple[int, ...] = (1, 17)
    plan: Tensor | None = None  # the key ranges of each head

    def __str__(self) -> str:
        return f"{super().__str__()}-" + "and".join(map(str, self.shifts))

    @property
    def geometry(self) -> Geometry:
        own = {"shifts": self.shifts, "plan": self.plan}
        return ShiftedGeometry(*self.lengths, self.causal, self.window, **own)

    @property
    def sequences(self) -> Sequences:
        return Sequences.from_entries(self.batch, *self.lengths).shifted(torch.tensor(self.shifts))


class ShiftedProblem(Problem):
    def dense(self) -> Tensor | None:
        bias, (n_query, n_key) = self.called_bias(), self.case.lengths
        if bias is None:
            return None
        each = []
        for b, shift in enumerate(self.case.shifts):
            own, n_place = of_entry(bias, b, n_key + shift), n_key + shift
            each.append(dense_of(own, n_query, n_place, self.grad_lse.dtype)[..., :n_key])
        return torch.cat(each)


def of_entry(bias, b: int, n_place: int):
    """The bias of batch entry b, for a sequence of n_place keys."""
    if isinstance(bias, SlopesOfSequences):
        return Linear(bias.slopes[b : b + 1])
    if isinstance(bias, biases.RelativeBias):
        return of_rows(bias, keys=slice(n_place), entries=slice(b, b + 1))
    if not isinstance(bias, biases.CumulativeBias):
        return bias
    steps, gain = (x if x is None or len(x) == 1 else x[b : b + 1] for x in (bias.steps, bias.gain))
    return biases.CumulativeBias(steps[..., :n_place], gain, bias.kernel)


def drawn_shifted(case: ShiftedCase) -> ShiftedProblem:
    n_query, n_key = case.lengths
    problem = drawn(replace(case, bias="none"))
    bias = (FORMS | OF_QUERIES)[case.bias](
        replace(case, lengths=(n_query, n_key + max(case.shifts)))
    )
    if bias is not None:
        problem.bias = bias.to(problem.grad_lse.dtype).requires_grad_(case.trained)
    return ShiftedProblem(**vars(problem) | {"case": case})


def shifted(problem: ShiftedProblem, backend: str = "cpu") -> tuple[Tensor, Tensor]:
    case, bias = problem.case, problem.called_bias()
    if isinstance(bias, biases.RelativeBias):
        bias = of_rows(bias, keys=slice(case.lengths[1]))
    call = prepared(
        problem.q,
        problem.k,
        problem.v,
        bias,
        case.causal,
        case.window,
        case.scale,
        None,
        backend,
        sequences=case.sequences,
    )
    if case.plan is None:
        return attend(call)
    o, lse, *_ = operators.forward(replace(call, plan=case.plan))
    return o, lse
