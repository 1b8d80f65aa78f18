"""Tables over distances are kept from step to step, and evaluated at new distances only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from biased_flash_attn import KVCache, biased_flash_attn_with_kvcache, biases
from biased_flash_attn.decoding.distance_tables import DistanceTables
from biased_flash_attn.forms import Geometry
from biased_flash_attn.shared_constants import PEAK_DISTANCES

H, HKV, D, DIM = 4, 2, 16, 64

# Each module with the bias that it makes of hidden states x (1, n, DIM) and queries q (1, H, n, D).
MODULES = {
    "kerple": (lambda: biases.KerpleLog(H), lambda m, x, q: m),
    "fire": (lambda: biases.FIRE(H, init_length=30), lambda m, x, q: m),
    "function": (
        lambda: biases.NormalizedBias.from_function(torch.sin, H, init_length=30),
        lambda m, x, q: m,
    ),
    "sinusoid": (lambda: biases.TransformerXL(H, D), lambda m, x, q: m(q=q)),
    "trained": (lambda: biases.TransformerXL(H, D, max_distance=9), lambda m, x, q: m(q=q)),
    "shaw": (lambda: biases.Shaw(H, D, 70), lambda m, x, q: m(q=q)),
    "disentangled": (
        lambda: biases.Disentangled(DIM, H, max_distance=90, buckets=32, terms=("c2p",)),
        lambda m, x, q: m(q=q, k=q),
    ),
    "gated": (lambda: biases.GatedTable(DIM, H, 32, 90), lambda m, x, q: m(x)),
    "band": (lambda: biases.BandedRelative(DIM, H, 80), lambda m, x, q: m(x)),
}


def tokens(n: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, queries, keys and values."""
    return torch.randn(1, n, DIM), torch.randn(1, H, n, D), *torch.randn(2, 1, HKV, n, D)


def made(name: str):
    make, bias_of = MODULES[name]
    module = make()
    with torch.no_grad():
        for x in module.parameters():
            x.add_(0.3 * torch.randn_like(x))
    return module, lambda x, q: bias_of(module, x, q)


@torch.no_grad()
def steps(bias_of, sizes: list[int], cache: KVCache, parts: list, **options) -> Tensor:
    """The outputs of the last step. parts: the tokens so far, to which those of the steps are
    added."""
    for n in sizes:
        parts.append(tokens(n))
        x, q, k, v = parts[-1]
        bias = bias_of(x, q)
        o = biased_flash_attn_with_kvcache(q, cache, k, v, bias, **options)
    return o


@torch.no_grad()
def anew(bias_of, parts: list, n: int) -> Tensor:
    """The outputs of the last n tokens, computed in one step of a new cache."""
    x, q, k, v = (torch.cat(y, -2) for y in zip(*parts, strict=True))
    cache = KVCache(1, HKV, D)
    return biased_flash_attn_with_kvcache(q, cache, k, v, bias_of(x, q), backend="reference")[
        :, :, -n:
    ]


@pytest.mark.parametrize("name", MODULES)
def test_tables_follow_their_parameters(name, backend):
    """Each of them, changed in place, whether tables or what belongs to queries depend on it."""
    module, bias_of = made(name)
    cache, parts = KVCache(1, HKV, D), []
    steps(bias_of, [40, 1], cache, parts, backend=backend)
    for parameter in module.parameters():
        with torch.no_grad():
            parameter.mul_(1.5).add_(0.1)
        o = steps(bias_of, [1], cache, parts, backend=backend)
        torch.testing.assert_close(o, anew(bias_of, parts, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
@torch.no_grad()
def test_tables_and_extremes_grow_to_those_of_one_lowering(name, seed):
    _, bias_of = made(name)
    x, q, _, _ = tokens(1)

    def whole(n: int):
        return bias_of(x, q).lower(Geometry(1, n), torch.float32, None)

    tables = DistanceTables(bias_of(x, q), whole(5))
    for n in (5, 6, 64, 65, 66, 40, 193, 500, 129, 501):
        bias = bias_of(x, q)
        length = bias.table_length(Geometry(1, n))
        form = bias.over(tables.upto(length, bias), Geometry(1, n), torch.float32)
        extremes = tables.extremes_upto(length)
        for ours, exact in zip(form.tensors, whole(n).tensors, strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-6)
        for ours, exact in zip(extremes, whole(n).extremes(PEAK_DISTANCES), strict=True):
            if exact is None:
                assert ours is None
                continue
            # The last block may include distances that occurred earlier.
            torch.testing.assert_close(ours[..., :-1], exact[..., :-1], rtol=1e-5, atol=1e-6)
            assert ours.shape == exact.shape


@pytest.mark.parametrize("name", MODULES)
def test_a_step_evaluates_new_distances_only(name, monkeypatch):
    _, bias_of = made(name)
    cache, parts = KVCache(1, HKV, D), []
    steps(bias_of, [40], cache, parts)
    evaluated = []
    kind = type(bias_of(*parts[0][:2]))
    tables_at = kind.tables

    def counted(self, d):
        evaluated.extend(d.tolist())
        return tables_at(self, d)

    monkeypatch.setattr(kind, "tables", counted)
    monkeypatch.setattr(kind, "lower", None)
    steps(bias_of, [1, 1, 30, 1], cache, parts)
    grows = name in ("kerple", "fire", "function", "sinusoid")
    assert evaluated == (list(range(40, 73)) if grows else [])


def test_tables_are_evaluated_where_distances_occur():
    """A function may know no others, as a table of trained positions does."""
    table = torch.randn(H, 40, dtype=torch.float64)
    seen = []

    def function(d):
        seen.extend(d.tolist())
        return table[:, d.long()]

    bias = biases.DistanceBias.from_function(function, H)
    steps(lambda x, q: bias, [10, 1, 1, 28], KVCache(1, HKV, D), [])
    assert sorted(seen) == list(range(40))


def test_new_tables_at_the_addresses_of_old_ones_are_new():
    cache, parts = KVCache(1, HKV, D), []
    steps(lambda x, q: biases.RelativeBias(q, torch.randn(1, D, 9)), [30], cache, parts)
    for _ in range(20):
        table = torch.randn(1, D, 9)

        def bias_of(x, q, table=table):
            return biases.RelativeBias(q, table)

        o = steps(bias_of, [1], cache, parts)
        torch.testing.assert_close(o, anew(bias_of, parts, 1), rtol=1e-4, atol=1e-5)
        del table, bias_of


def test_a_cache_keeps_no_factors_of_queries():
    _, bias_of = made("sinusoid")
    cache = KVCache(1, HKV, D)
    steps(bias_of, [200], cache, [])
    kept = cache.distance_tables.form.query_factors
    assert kept.untyped_storage().nbytes() == 0


def test_nan_of_new_distances_is_refused():
    bias = biases.DistanceBias.from_function(lambda d: (50 - d).sqrt(), H)
    cache, parts = KVCache(1, HKV, D), []
    steps(lambda x, q: bias, [40, 11], cache, parts)
    with pytest.raises(ValueError, match="bias: its table values contain NaN"):
        steps(lambda x, q: bias, [1], cache, parts)
    assert cache.lengths == [51]


def test_functions_whose_parameters_need_gradients_are_refused():
    module, _ = made("sinusoid")
    cache, parts = KVCache(1, HKV, D), []
    steps(lambda x, q: module(q=q), [9], cache, parts)
    _, q, k, v = tokens(1)
    bias = biases.RelativeBias(q, module.table)
    with pytest.raises(ValueError, match="bias requires gradients"):
        biased_flash_attn_with_kvcache(q, cache, k, v, bias)
    assert cache.lengths == [9]


class Scaled(nn.Module):
    """A function of the distance whose factor is no parameter."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor(-0.1))

    def forward(self, d: Tensor) -> Tensor:
        return self.factor * d


FACTOR = -0.1


def of_global(d: Tensor) -> Tensor:
    return FACTOR * d


def of_buffer(monkeypatch):
    scaled = Scaled()
    return biases.DistanceBias.from_function(scaled, H), lambda: scaled.factor.mul_(9)


def of_data(monkeypatch):
    kerple = biases.KerpleLog(H)
    return kerple, lambda: kerple.r1.data.copy_(torch.full((H,), 9.0))


def of_parameters_of_inference_mode(monkeypatch):
    with torch.inference_mode():
        kerple = biases.KerpleLog(H).requires_grad_(False)

    def change():
        with torch.inference_mode():
            kerple.r1.fill_(9.0)

    return kerple, change


def of_many_parameters_of_inference_mode(monkeypatch):
    with torch.inference_mode():
        table = biases.ClippedTable(H, 2**14).requires_grad_(False)

    def change():
        with torch.inference_mode():
            table.r.normal_()

    return table, change


def of_captured_tensor(monkeypatch):
    factor = torch.tensor([-0.1])
    bias = biases.NormalizedBias.from_function(lambda x: factor * x, H, error=0.1, init_length=9)
    return bias, lambda: factor.mul_(90)


def of_captured_module(monkeypatch):
    scaled = Scaled()
    bias = biases.DistanceBias.from_function(lambda d: scaled(d), H)
    return biases.of_heads(bias, 0, H), lambda: scaled.factor.mul_(9)


def of_captured_number(monkeypatch):
    bias = biases.DistanceBias.from_function(of_global, H)
    return bias, lambda: monkeypatch.setitem(of_global.__globals__, "FACTOR", -0.9)


def of_captured_table(monkeypatch):
    table = torch.randn(1, D, 99)
    function = lambda d: table[..., d.long()]  # noqa: E731
    return lambda q: biases.RelativeBias(q, function), lambda: table.normal_()


@pytest.mark.parametrize(
    "case",
    [
        *(of_buffer, of_data, of_parameters_of_inference_mode, of_captured_tensor),
        *(of_many_parameters_of_inference_mode, of_captured_module, of_captured_number),
        of_captured_table,
    ],
)
def test_tables_follow_whatever_they_are_made_from(case, monkeypatch):
    bias, change = case(monkeypatch)

    def bias_of(x, q):
        return bias if isinstance(bias, biases.Bias) else bias(q)

    cache, parts = KVCache(1, HKV, D), []
    steps(bias_of, [40, 1], cache, parts)
    with torch.no_grad():
        change()
    o = steps(bias_of, [1], cache, parts)
    torch.testing.assert_close(o, anew(bias_of, parts, 1), rtol=1e-4, atol=1e-5)
