"""The gradient of a table of distances, where blocks share partial sums."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor, nn

from biased_flash_attn import backends
from biased_flash_attn.cuda_kernels import table_gradient
from biased_flash_attn.cuda_kernels.variants import BLOCK_M
from biased_flash_attn.forms import Distance, Geometry
from biased_flash_attn.forms.gradients import OWN
from biased_flash_attn.problem import Problem
from tests.kernels.cuda.backend import MARKS, check
from tests.sequences.packed_cases import PackedCase, drawn_packed, packed
from tests.support import problems
from tests.support.cases import Case
from tests.support.numerics import assert_close_to_float64
from tests.support.plans import PlannedCase, planned, random_plan
from tests.support.problems import drawn, magnitudes

pytestmark = MARKS
# Tables of twice as many distances as queries: sums of the size of q have few slots.
SETTINGS = {"bias": "distance", "dtype": torch.float16, "dims": (8, 8), "causal": False}


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """The number of launches of each backward pass; few blocks are enough for one."""
    monkeypatch.setattr(table_gradient, "LEAST_BLOCKS", 1)
    counts, of_problem = [], table_gradient.launches

    def counted(*arguments):
        orders = of_problem(*arguments)
        counts.append(len(orders))
        return orders

    monkeypatch.setattr(table_gradient, "launches", counted)
    return counts


@pytest.mark.parametrize("batch", [1, 2])
def test_sums_of_several_launches_are_exact(batch, launches):
    check(Case(lengths=(500, 300), heads=(2, 1), batch=batch, **SETTINGS))
    assert launches == [2]


def test_sums_of_several_launches_of_a_plan_are_exact(launches):
    case = Case(lengths=(500, 300), heads=(2, 1), batch=1, **SETTINGS)
    problem = drawn(case)
    problem.case = PlannedCase(**vars(case), plan=random_plan(case, some_empty=False))
    check(problem, functools.partial(planned, backend="cuda"))
    assert launches == [2]


def test_sums_of_packed_sequences_are_exact(launches):
    lengths = ((150, 30), (9, 0), (0, 5), (260, 140))
    problem = drawn_packed(PackedCase.of(lengths, heads=(2, 2), **SETTINGS))
    check(problem, functools.partial(packed, backend="cuda"))
    assert launches == [3]


def table_problem(batch: int, entries: int, lengths: tuple[int, int], **settings) -> Problem:
    q = torch.randn(batch, 3, lengths[0], 16).half()
    k, v = torch.randn(2, batch, 3, lengths[1], 16).half()
    geometry = Geometry(*lengths, **settings)
    table = torch.randn(entries, 3, geometry.n_distances)
    return Problem(q, k, v, Distance(table), geometry, 0.3, 0.0, "cuda")


class TablesOfEntries(nn.Module):
    """The bias of a call with a table for each batch entry."""

    def __init__(self, call: Problem):
        super().__init__()
        self.table, self.geometry = nn.Parameter(call.form.table.double()), call.geometry

    def dense(self, n_query: int, n_key: int) -> Tensor:
        return Distance(self.table).dense(self.geometry)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both"])
def test_tables_of_batch_entries_have_their_own_gradients(causal):
    def gradient(name: str, dtype: torch.dtype) -> torch.Tensor:
        q, k, v, table = (x.to(dtype) for x in (call.q, call.k, call.v, call.form.table))
        form = Distance(table.requires_grad_())
        o, _ = backends.get(name).forward(Problem(q, k, v, form, geometry, 0.3, 0.0, name))
        return torch.autograd.grad(o, table, grad_o.to(dtype))[0]

    call = table_problem(2, 2, (140, 150), causal=causal)
    geometry, grad_o = call.geometry, torch.randn_like(call.q)
    o, lse = backends.get("cuda").forward(call)
    results = o, lse, grad_o, torch.zeros_like(lse)
    *_, (found,) = backends.get("cuda").backward(call, *results, targets=[OWN])
    exact, naive = (gradient("reference", dtype) for dtype in (torch.float64, torch.float16))
    case = Case(lengths=(140, 150), heads=(3, 3), causal=causal, scale=call.scale)
    q, k, v, to_o = (x.double() for x in (call.q, call.k, call.v, grad_o))
    same = problems.Problem(case, q, k, v, TablesOfEntries(call), to_o, lse.new_zeros(lse.shape))
    terms = magnitudes(same, torch.float16)["gradient of table"]
    assert_close_to_float64(found, exact, naive, "gradient of the tables", terms)


@pytest.mark.parametrize("entries", [1, 3])
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("is_planned", [True, False], ids=["plan", "all"])
def test_blocks_of_a_launch_have_slots_of_their_own(is_planned, slots, entries):
    """And every block is launched once, in the given order."""
    problem = table_problem(3, entries, (1000, 200))
    blocks, heads = 8, problem.q.shape[1]
    order = torch.randperm(3 * heads * blocks).int() if is_planned else None
    sums = torch.zeros(entries, heads, slots, problem.geometry.n_distances)
    found = table_gradient.launches(problem, sums, order)
    assert len(found) == -(-3 // entries * blocks // slots)
    assert sorted(torch.cat(found).tolist()) == list(range(3 * heads * blocks))
    for numbers in found:
        assert is_in_order(numbers, order, blocks)
        written = [slot_of(n, heads, blocks, slots, entries) for n in numbers.tolist()]
        assert len(set(written)) == len(written)


def is_in_order(numbers, order, blocks: int) -> bool:
    """As in `order`, or by decreasing blocks."""
    if order is None:
        return bool((numbers[1:] % blocks <= numbers[:-1] % blocks).all())
    place = order.argsort()[numbers.long()]
    return bool((place[1:] > place[:-1]).all())


def slot_of(number: int, heads: int, blocks: int, slots: int, entries: int) -> tuple[int, int, int]:
    """As the kernel computes it: batch entry, head and slot."""
    group, block = divmod(number, blocks)
    b, h = divmod(group, heads)
    return (b, h, block % slots) if entries > 1 else (0, h, (b * blocks + block) % slots)


@pytest.mark.parametrize("entries", [1, 2])
def test_sums_are_not_larger_than_q(entries, monkeypatch):
    monkeypatch.setattr(table_gradient, "LEAST_BLOCKS", 1)
    for n_query, n_key, causal in itertools.product((100, 5000), (70, 3000), (True, False)):
        problem = table_problem(2, entries, (n_query, n_key), causal=causal)
        sums = table_gradient.partial_sums(problem)
        shape = entries, 3, sums.shape[2], problem.geometry.n_distances
        assert sums.shape == shape
        assert sums.nbytes <= problem.q.nbytes or sums.shape[2] == 1
        assert sums.shape[2] <= 2 // entries * -(-n_query // BLOCK_M)
