"""Bounds on the mass of a `relative` bias for skipping."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from biased_flash_attn import biases
from biased_flash_attn.forms import Geometry, KeySide
from biased_flash_attn.forms.chunk_pairs import Pair
from biased_flash_attn.shared_constants import TILE_KEYS
from tests.forms.relative_cases import TERMS, drawn, leaves, one_of


@st.composite
def bounded(draw):
    """A random bias, and a geometry with a few tiles of keys."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    n_key = draw(st.integers(1, 200))
    geometry = Geometry(draw(st.sampled_from([n_key, 1, 40])), n_key, draw(st.booleans()))
    first = draw(st.sampled_from([0, 0, -1, -40, -300]))
    bias = drawn(
        geometry,
        rank=draw(st.sampled_from([1, 3, 16])),
        extent=first + draw(st.sampled_from([1, 2, 50, 350])),
        first=first,
        terms=draw(st.sampled_from(TERMS)),
        beyond=draw(st.sampled_from(["zero", "last"])),
        batch=1,
    )
    kind = draw(st.sampled_from(["plain", "aligned", "peak", "decaying", "one long row"]))
    with torch.no_grad():
        for name, x in leaves(bias).items():
            n = x.shape[-1]
            if kind == "aligned":  # as large a product as the norms allow
                x.copy_(torch.ones_like(x) * x.abs().amax())
            if kind == "peak" and "tables" in name:
                x[..., one_of(*range(n))] *= 30
            if kind == "decaying" and "tables" in name:
                x.mul_(torch.exp(-torch.arange(n) / 20.0))
            if kind == "one long row" and "factors" in name:
                x[:, :, one_of(*range(x.shape[2]))] *= 30
    return bias, geometry


def sides_of(geometry: Geometry) -> list[KeySide]:
    past = KeySide(geometry.positions(), geometry.n_key)
    return [past] if geometry.causal else [past, past.mirrored()]


def exact_masses(dense: Tensor, side: KeySide) -> Tensor:
    """log sum exp of the bias over the keys before each cut, (B, H, n_query, tiles + 1)."""
    dense = dense.flip(-1) if side.is_mirrored else dense
    cuts = side.cut(torch.arange(side.tiles + 1)).clamp(max=side.n_key).tolist()
    return torch.stack([dense[..., :cut].logsumexp(-1) for cut in cuts], -1)


@given(bounded())
def test_bounds_are_never_below_the_mass(problem):
    bias, geometry = problem
    form = bias.lower(geometry, torch.float64, None)
    dense = form.dense(geometry).detach()
    dense = dense.expand(1, 2, -1, -1)
    for side in sides_of(geometry):
        if geometry.causal:  # only tiles before the query are cut
            dense = dense.masked_fill(~geometry.visible(), -torch.inf)
        exact = exact_masses(dense, side)
        mass, before = form.mass(side, geometry), None
        for tile in range(side.tiles + 1):
            at = torch.full((1, 2, geometry.n_query), tile)
            found = mass.log_mass(slice(None), at).detach()
            assert not found.isnan().any()
            assert (found >= exact[..., tile] - 1e-9).all()
            assert before is None or (found >= before).all()
            before = found


def test_bounds_of_other_chunks_are_never_below_their_mass():
    n, chunks = TILE_KEYS + 10, 3
    for first, beyond, causal in itertools.product((0, -3, -500), ("zero", "last"), (True, False)):
        whole = Geometry(n * chunks, n * chunks, causal)
        bias = drawn(whole, first=first, extent=one_of(4, 100), beyond=beyond, batch=1)
        form = bias.lower(whole, torch.float64, None)
        for pair in (Pair(2, 0, n, chunks, causal, None), Pair(0, 1, n, chunks, causal, None)):
            if causal and not pair.is_past:
                continue
            at = slice(pair.query_chunk * n, (pair.query_chunk + 1) * n)
            of_queries = form.for_queries(at)
            dense = of_queries.for_pair(pair, None).dense(pair.geometry).detach().expand(1, 2, n, n)
            i = torch.arange(n)
            side = KeySide(n + i, n)
            if not pair.is_past:
                side = KeySide(2 * n - 1 - i, n, -n % TILE_KEYS, True)
            exact, mass = exact_masses(dense, side), of_queries.mass_for_pair(pair, side, None)
            for tile in range(side.tiles + 1):
                found = mass.log_mass(slice(None), torch.full((1, 2, n), tile))
                assert (found >= exact[..., tile] - 1e-9).all()


def decreasing(d: Tensor) -> Tensor:
    """A table so steep that the nearest key outweighs all others."""
    return (1e6 * 0.98 ** d.abs() - 1e3 * (d < 0))[None, None]


def assert_bound_of_nearest_key(mass, dense: Tensor, side: KeySide) -> None:
    """The bound is the number of keys before the cut times the exponential of the largest bias."""
    dense = dense.flip(-1) if side.is_mirrored else dense
    for tile in range(1, side.tiles + 1):
        cut = int(side.cut(torch.tensor(tile)).clamp(max=side.n_key))
        largest = dense[..., :cut].amax(-1)
        found = mass.log_mass(slice(None), torch.full(largest.shape, tile)) - math.log(cut)
        before = (cut <= side.positions) & (side.cut(torch.tensor(tile)) == cut)
        torch.testing.assert_close(found[..., before], largest[..., before], rtol=1e-12, atol=0)


@pytest.mark.parametrize("terms", ["query", "key"])
def test_bounds_are_those_of_the_nearest_key(terms):
    n, chunks = TILE_KEYS + 10, 3
    ones = torch.ones(1, 1, n * chunks, 1).double()
    bias = biases.RelativeBias(**{f"{terms}_factors": ones, f"{terms}_tables": decreasing})
    whole = Geometry(n * chunks, n * chunks, causal=False)
    form = bias.lower(whole, torch.float64, None)
    for side in sides_of(whole):
        assert_bound_of_nearest_key(form.mass(side, whole), form.dense(whole), side)
    i = torch.arange(n)
    for pair in (Pair(2, 0, n, chunks, False, None), Pair(0, 2, n, chunks, False, None)):
        side = (
            KeySide(n + i, n) if pair.is_past else KeySide(2 * n - 1 - i, n, -n % TILE_KEYS, True)
        )
        part = form.for_queries(slice(pair.query_chunk * n, (pair.query_chunk + 1) * n))
        dense = part.for_pair(pair, None).dense(pair.geometry)
        assert_bound_of_nearest_key(part.mass_for_pair(pair, side, None), dense, side)


def test_a_key_counts_only_before_the_cut():
    n = 3 * TILE_KEYS
    factors = torch.zeros(1, 1, n, 1).double()
    factors[:, :, -1] = 7
    geometry = Geometry(n, n, causal=False)
    table = torch.ones(1, 1, 2 * n - 1).double()
    bias = biases.RelativeBias(key_factors=factors, key_tables=table, first=1 - n)
    form = bias.lower(geometry, torch.float64, None)
    first_tile = torch.full((1, 1, n), 1)
    past, after = (
        form.mass(x, geometry).log_mass(slice(None), first_tile) for x in sides_of(geometry)
    )
    torch.testing.assert_close(past, torch.full_like(past, math.log(TILE_KEYS)))
    torch.testing.assert_close(after, past + 7)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_values_have_no_bound(which, value):
    """With a nonfinite value of some key before the last cut."""
    geometry = Geometry(130, 130)
    form = drawn(geometry, extent=130, batch=1).lower(geometry, torch.float64, None)
    with torch.no_grad():
        form.tensors[which][:, :, 0 if which % 2 == 0 else slice(None), -1] = value
    side = KeySide(geometry.positions(), 130)
    mass = form.mass(side, geometry).log_mass(slice(None), torch.full((1, 2, 130), 1))
    row = 0 if which == 0 else -1
    assert not (mass[..., row].isfinite()).any()


def test_bands_decay_unlike_a_norm_over_all_distances():
    geometry = Geometry(500, 500)
    u, p = 10 * torch.randn(1, 2, 500, 4), torch.randn(2, 4, 50)
    for bias, expected in (
        (biases.RelativeBias(u, p), True),
        (biases.RelativeBias(u / 1e3, p), False),
        (biases.RelativeBias(u, p / p.norm(dim=1, keepdim=True), beyond="last"), False),
        (biases.RelativeBias(key_factors=u, key_tables=p), True),
    ):
        form = bias.lower(geometry, torch.float32, None)
        assert form.decays(geometry, math.log(1e-6)) is expected


def test_roundings_bound_the_error_of_float32():
    geometry = Geometry(60, 60)
    for rank, terms in itertools.product((1, 16, 128), TERMS):
        bias = drawn(geometry, rank=rank, terms=terms, extent=20, batch=1, dtype=torch.float32)
        form = bias.lower(geometry, torch.float32, None)
        dense, tensors = form.dense(geometry), [x.detach() for x in form.tensors]
        u, p, w, q = tensors
        products = (u @ p)[..., :1], (w @ q)[..., :1]
        error = dense.diagonal(0, -2, -1) - (products[0] + products[1]).squeeze(-1).double()
        bound = form.roundings(torch.float32)
        assert (error.abs() <= 2.0**-23 * bound).all()
        assert bound.shape[-1] == 60


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_roundings_bound_the_loss_of_half_precision_twice(half):
    geometry = Geometry(60, 60)
    for rank, terms in itertools.product((1, 16, 128), TERMS):
        bias = drawn(geometry, rank=rank, terms=terms, extent=20, batch=1, dtype=torch.float32)
        form = bias.lower(geometry, torch.float32, None)
        converted = form.with_tensors([x.detach().to(half).float() for x in form.tensors])
        lost = (form.dense(geometry) - converted.dense(geometry)).abs().amax(-1)
        assert (2 * lost <= 2.0**-23 * form.roundings(half)).all()
        assert torch.equal(converted.roundings(half), converted.roundings(torch.float32))
