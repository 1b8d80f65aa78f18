"""The gradient of a table of distances, where blocks share partial sums."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import Tensor, nn

from biased_flash_attn import backends
from biased_flash_attn.cuda_kernels import table_gradient
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
SETTINGS = {"bias": "distance", "dtype": torch.float16, "causal": False}
# The kernel for all gradients, with blocks of keys, does not compute the second: its values are too
# wide.
OF_EITHER_KERNEL = pytest.mark.parametrize("dims", [(8, 8), (8, 136)], ids=["all", "queries"])


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """The number of launches of each backward pass; few blocks are enough for one, and sums are not
    larger than q."""
    monkeypatch.setattr(table_gradient, "LEAST_BLOCKS", 1)
    monkeypatch.setattr(table_gradient, "MOST_OF_Q", 1)
    counts, of_problem = [], table_gradient.launches

    def counted(*arguments):
        orders = of_problem(*arguments)
        counts.append(len(orders))
        return orders

    monkeypatch.setattr(table_gradient, "launches", counted)
    return counts


@OF_EITHER_KERNEL
@pytest.mark.parametrize("batch", [1, 2])
def test_sums_of_several_launches_are_exact(batch, dims, launches):
    check(Case(lengths=(500, 300), dims=dims, heads=(2, 1), batch=batch, **SETTINGS))
    assert launches == [2]


@OF_EITHER_KERNEL
def test_sums_of_several_launches_of_a_plan_are_exact(dims, launches):
    case = Case(lengths=(500, 300), dims=dims, heads=(2, 1), batch=1, **SETTINGS)
    problem = drawn(case)
    problem.case = PlannedCase(**vars(case), plan=random_plan(case, some_empty=False))
    check(problem, functools.partial(planned, backend="cuda"))
    assert launches == [2]


@OF_EITHER_KERNEL
def test_sums_of_packed_sequences_are_exact(dims, launches):
    lengths = ((150, 30), (9, 0), (0, 5), (260, 140))
    problem = drawn_packed(PackedCase.of(lengths, dims=dims, heads=(2, 2), **SETTINGS))
    check(problem, functools.partial(packed, backend="cuda"))
    blocks = {(8, 8): 2, (8, 136): 3}[dims]  # of each of the four sequences, which have four slots
    assert launches == [blocks]


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
        o, *_ = backends.get(name).forward(Problem(q, k, v, form, geometry, 0.3, 0.0, name))
        return torch.autograd.grad(o, table, grad_o.to(dtype))[0]

    call = table_problem(2, 2, (140, 150), causal=causal)
    geometry, grad_o = call.geometry, torch.randn_like(call.q)
    o, lse, *softmax = backends.get("cuda").forward(call)
    results = o, *softmax, grad_o, torch.zeros_like(lse)
    *_, (found,) = backends.get("cuda").backward(call, *results, targets=[OWN])
    exact, naive = (gradient("reference", dtype) for dtype in (torch.float64, torch.float16))
    case = Case(lengths=(140, 150), heads=(3, 3), causal=causal, scale=call.scale)
    q, k, v, to_o = (x.double() for x in (call.q, call.k, call.v, grad_o))
    same = problems.Problem(case, q, k, v, TablesOfEntries(call), to_o, lse.new_zeros(lse.shape))
    terms = magnitudes(same, torch.float16)["gradient of table"]
    assert_close_to_float64(found, exact, naive, "gradient of the tables", terms)


@pytest.mark.parametrize("entries", [1, 3])
@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("order", ["plan", "last first", "first first"])
def test_blocks_of_a_launch_have_slots_of_their_own(order, group, slots, entries):
    """And every block is launched once, in the given order. Blocks of keys add to the slots of each
    query head of a group."""
    blocks, heads = 8, 3 // group
    planned = torch.randperm(3 * heads * blocks).int() if order == "plan" else None
    sums = torch.zeros(entries, heads * group, slots, 7)
    shape = 3, heads, blocks
    found = table_gradient.launches(sums, shape, planned, last_first=order == "last first")
    assert len(found) == -(-3 // entries * blocks // slots)
    assert sorted(torch.cat(found).tolist()) == list(range(3 * heads * blocks))
    for numbers in found:
        assert is_in_order(numbers, planned, blocks, order == "last first")
        written = [slot_of(n, heads, blocks, slots, entries) for n in numbers.tolist()]
        assert len(set(written)) == len(written)


def is_in_order(numbers, planned, blocks: int, last_first: bool) -> bool:
    """As planned, or by decreasing or increasing blocks."""
    if planned is None:
        step = (numbers % blocks).diff()
        return bool((step <= 0).all() if last_first else (step >= 0).all())
    place = planned.argsort()[numbers.long()]
    return bool((place.diff() > 0).all())


def test_a_launch_of_all_blocks_has_their_order():
    sums, order = torch.zeros(1, 2, 6, 7), torch.randperm(12).int()
    for given in (order, None):
        assert table_gradient.launches(sums, (1, 2, 6), given, last_first=True) == [given]


def slot_of(number: int, heads: int, blocks: int, slots: int, entries: int) -> tuple[int, int, int]:
    """As the kernel computes it: batch entry, head and slot."""
    group, block = divmod(number, blocks)
    b, h = divmod(group, heads)
    return (b, h, block % slots) if entries > 1 else (0, h, (b * blocks + block) % slots)


@pytest.mark.parametrize("entries", [1, 2])
def test_sums_are_not_larger_than_q_in_float32(entries, monkeypatch):
    monkeypatch.setattr(table_gradient, "LEAST_BLOCKS", 1)
    settings = (100, 5000), (70, 3000), (True, False), (1, 7, 40)
    for n_query, n_key, causal, blocks in itertools.product(*settings):
        problem = table_problem(2, entries, (n_query, n_key), causal=causal)
        sums = table_gradient.partial_sums(problem, 3, blocks)
        shape = entries, 3, sums.shape[2], problem.geometry.n_distances
        assert sums.shape == shape
        assert sums.nbytes <= 2 * problem.q.nbytes or sums.shape[2] == 1
        assert sums.shape[2] <= 2 // entries * blocks
