"""Key ranges are trimmed by the mass at their far end, compared with float64 sums."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from biased_flash_attn import backends
from biased_flash_attn.forms import Geometry, Linear
from biased_flash_attn.problem import Problem
from biased_flash_attn.shared_constants import PLAN_QUERIES, TILE_KEYS
from biased_flash_attn.skipping import plans
from tests.support.biases import FORMS
from tests.support.cases import DTYPES, INSTRUCTION_SETS, Case, pairwise
from tests.support.problems import drawn, prepared_call

REACH = 40
SLACK = 1e-2  # relative to a sum: the exponentials of bfloat16 kernels are coarse


@dataclass
class Trimmed:
    """The ranges that a kernel returned, and the float64 sums that determine them."""

    cut: Tensor  # (B, H, tiles of queries)
    log_mass: Tensor  # of the keys before each key, or after it, (B, H, Nq, Nk + 1)
    limit: Tensor  # the farthest cut that keeps the nearest keys of all queries, (tiles,)
    fraction: float
    from_end: bool

    def tile_sums(self, cut: Tensor) -> Tensor:
        """The largest mass removed from a query of each tile by a cut, (B, H, tiles)."""
        row = torch.arange(self.log_mass.shape[2]) // PLAN_QUERIES
        sums = self.log_mass.gather(3, cut.long()[..., row, None]).squeeze(3).exp()
        padded = torch.nn.functional.pad(sums, (0, -sums.shape[2] % PLAN_QUERIES))
        return padded.unflatten(2, (-1, PLAN_QUERIES)).amax(3)

    def check(self) -> None:
        assert (self.tile_sums(self.cut) <= self.fraction * (1 + SLACK)).all()
        further = self.cut + (-TILE_KEYS if self.from_end else TILE_KEYS)
        beyond = further < self.limit if self.from_end else further > self.limit
        n_key = self.log_mass.shape[3] - 1
        too_much = self.tile_sums(further.clamp(0, n_key)) > self.fraction * (1 - SLACK)
        assert (beyond | too_much).all()


def trimmed(case: Case, backend: str, fraction: float, from_end: bool) -> Trimmed:
    problem = drawn(case)
    call = prepared_call(problem, "reference", tolerance=0.0).detached()
    q, k, geometry = call.q, call.k, call.geometry
    group = q.shape[1] // k.shape[1]
    s = call.scale * q.double() @ k.double().repeat_interleave(group, 1).mT
    s = s + call.form.dense(geometry)
    s = s.masked_fill(~geometry.visible(), -torch.inf)
    d = geometry.pair_distances()
    near = s.masked_fill(~((d >= 0) & (d < REACH)), -torch.inf).logsumexp(-1).nan_to_num(neginf=0)
    log_mass = (s - near[..., None]).flip(-1) if from_end else s - near[..., None]
    log_mass = torch.nn.functional.pad(log_mass, (1, 0), value=-torch.inf).logcumsumexp(-1)

    near = near.to(torch.promote_types(q.dtype, torch.float32))
    call = replace(call, plan=plans.full_plan(q, geometry))
    cut = backends.get(backend).trim(call, near, fraction, REACH, from_end)
    first = geometry.positions()[::PLAN_QUERIES]
    if case.window and not from_end:  # a cut may ignore keys that the window hides from all queries
        cut = torch.maximum(cut, (first - case.window + 1) // TILE_KEYS * TILE_KEYS)
    last = (first + PLAN_QUERIES - 1).clamp(max=geometry.n_key - 1)
    limit = last + 1 if from_end else first - REACH + 1
    return Trimmed(cut, log_mass.flip(-1) if from_end else log_mass, limit, fraction, from_end)


COMBINATIONS = pairwise(
    bias=[name for name in FORMS if name != "none"],
    dtype=DTYPES,
    lengths=[(130, 130), (500, 500), (257, 900), (900, 590), (1, 300), (770, 770)],
    dims=[(16, 16), (40, 8), (63, 64)],
    heads=[(1, 1), (4, 2)],
    causal=[True, False],
    window=[None, 150],
    layout=["contiguous", "heads_inside"],
    fraction=[1e-1, 1e-4],
    instruction_set=INSTRUCTION_SETS,
)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("instruction_set", "fraction", "case"),
    [(row.pop("instruction_set"), row.pop("fraction"), Case(**row)) for row in COMBINATIONS],
    ids=str,
)
def test_trimming_removes_as_much_as_allowed(instruction_set, fraction, case):
    with backends.instruction_set(instruction_set):
        for from_end in (False,) if case.causal else (False, True):
            trimmed(case, "cpu", fraction, from_end).check()


def check_nonfinite_values_disable_trimming(backend: str, value: float) -> None:
    """In a key, or in the bound on lse of one query of the third tile."""
    q, k = torch.zeros(1, 1, 500, 16), torch.zeros(1, 1, 500, 16)
    form, geometry = Linear(torch.ones(1, 1)), Geometry(500, 500)
    near = torch.full((1, 1, 500), 100.0)
    plan = plans.full_plan(q, geometry)

    def cuts(q, k, near):
        call = Problem(q, k, k, form, geometry, 1.0, 0.0, backend, plan)
        cut = backends.get(backend).trim(call, near, 1e-6, REACH, False)
        return (cut // TILE_KEYS * TILE_KEYS).flatten().tolist()

    assert cuts(q, k, near) == [0, 64, 192, 320]
    near[0, 0, 300] = torch.nan
    assert cuts(q, k, near) == [0, 64, 0, 320]
    k[0, 0, 100] = value
    assert cuts(q + 1, k, near) == [0, 64, 0, 64]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_values_disable_trimming(value):
    for instruction_set in INSTRUCTION_SETS:
        with backends.instruction_set(instruction_set):
            check_nonfinite_values_disable_trimming("cpu", value)
