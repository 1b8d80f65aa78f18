"""Ranges are trimmed by the mass that kernels find at their far end, as float64 finds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from biased_flash_attn import backends
from biased_flash_attn.attention import prepared
from biased_flash_attn.forms import Geometry, Linear
from biased_flash_attn.problem import Problem
from biased_flash_attn.shared_constants import PLAN_QUERIES, TILE_KEYS
from biased_flash_attn.skipping import plans
from tests.support.biases import FORMS
from tests.support.cases import DTYPES, INSTRUCTION_SETS, Case, pairwise
from tests.support.problems import drawn

REACH = 40
SLACK = 1e-2  # of a sum: the exponentials of bfloat16 kernels are coarse


@dataclass
class Trimmed:
    """What a kernel made of a call, and the sums in float64 that it should have gone by."""

    cut: Tensor  # (B, H, tiles of queries)
    went: Tensor  # log of the sum over the keys before each key, or after it, (B, H, Nq, Nk + 1)
    limit: Tensor  # which cut spares the nearest keys of all queries, (tiles,)
    share: float
    from_end: bool

    def tile_sums(self, cut: Tensor) -> Tensor:
        """The largest sum of a query of each tile, were its range cut there. (B, H, tiles)"""
        row = torch.arange(self.went.shape[2]) // PLAN_QUERIES
        sums = self.went.gather(3, cut.long()[..., row, None]).squeeze(3).exp()
        padded = torch.nn.functional.pad(sums, (0, -sums.shape[2] % PLAN_QUERIES))
        return padded.unflatten(2, (-1, PLAN_QUERIES)).amax(3)

    def check(self) -> None:
        assert (self.tile_sums(self.cut) <= self.share * (1 + SLACK)).all()
        further = self.cut + (-TILE_KEYS if self.from_end else TILE_KEYS)
        beyond = further < self.limit if self.from_end else further > self.limit
        n_key = self.went.shape[3] - 1
        too_much = self.tile_sums(further.clamp(0, n_key)) > self.share * (1 - SLACK)
        assert (beyond | too_much).all()


def trimmed(case: Case, backend: str, share: float, from_end: bool) -> Trimmed:
    problem = drawn(case)
    options = (case.causal, case.window, case.scale, 0.0, "reference")
    call = prepared(problem.q, problem.k, problem.v, problem.called_bias(), *options).detached()
    q, k, geometry = call.q, call.k, call.geometry
    group = q.shape[1] // k.shape[1]
    s = call.scale * q.double() @ k.double().repeat_interleave(group, 1).mT
    s = s + call.form.dense(geometry)
    s = s.masked_fill(~geometry.visible(), -torch.inf)
    d = geometry.pair_distances()
    near = s.masked_fill(~((d >= 0) & (d < REACH)), -torch.inf).logsumexp(-1).nan_to_num(neginf=0)
    went = (s - near[..., None]).flip(-1) if from_end else s - near[..., None]
    went = torch.nn.functional.pad(went, (1, 0), value=-torch.inf).logcumsumexp(-1)

    near = near.to(torch.promote_types(q.dtype, torch.float32))
    call = replace(call, plan=plans.full_plan(q, geometry))
    cut = backends.get(backend).trim(call, near, share, REACH, from_end)
    first = geometry.positions()[::PLAN_QUERIES]
    if case.window and not from_end:  # what the window hides from all goes unsaid
        cut = torch.maximum(cut, (first - case.window + 1) // TILE_KEYS * TILE_KEYS)
    last = (first + PLAN_QUERIES - 1).clamp(max=geometry.n_key - 1)
    limit = last + 1 if from_end else first - REACH + 1
    return Trimmed(cut, went.flip(-1) if from_end else went, limit, share, from_end)


COMBINATIONS = pairwise(
    bias=[name for name in FORMS if name != "none"],
    dtype=DTYPES,
    lengths=[(130, 130), (500, 500), (257, 900), (900, 590), (1, 300), (770, 770)],
    dims=[(16, 16), (40, 8), (63, 64)],
    heads=[(1, 1), (4, 2)],
    causal=[True, False],
    window=[None, 150],
    layout=["contiguous", "heads_inside"],
    share=[1e-1, 1e-4],
    instruction_set=INSTRUCTION_SETS,
)


@pytest.mark.parametrize(
    ("instruction_set", "share", "case"),
    [(row.pop("instruction_set"), row.pop("share"), Case(**row)) for row in COMBINATIONS],
    ids=str,
)
def test_as_much_goes_as_the_share_allows(instruction_set, share, case):
    with backends.instruction_set(instruction_set):
        for from_end in (False,) if case.causal else (False, True):
            trimmed(case, "cpu", share, from_end).check()


def check_that_nothing_goes_where_nothing_is_known(backend: str, value: float) -> None:
    """In a key, or in what is known of one query of the third tile."""
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
def test_nothing_goes_where_nothing_is_known(value):
    for instruction_set in INSTRUCTION_SETS:
        with backends.instruction_set(instruction_set):
            check_that_nothing_goes_where_nothing_is_known("cpu", value)
