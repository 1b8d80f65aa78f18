"""Caches of which much or little may be left out, and checks of what is."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace

import torch
from torch import Tensor

from biased_flash_attn import KVCache, biased_flash_attn_with_kvcache, biases
from biased_flash_attn.forms import Form, Geometry

HEADS, KV_HEADS, DIM = 4, 2, 16


def steep_slopes():
    bias = biases.ALiBi(HEADS, trainable=True)
    bias.slopes.data.copy_(0.02 + 0.3 * torch.rand(HEADS).square())
    return bias


def mixed_slopes():
    bias = steep_slopes()
    bias.slopes.data[0] *= -0.02
    return bias


def wandering_table():
    curve = -(0.02 * torch.arange(4096.0, dtype=torch.float64)) + torch.randn(HEADS, 4096).double()
    return biases.DistanceBias.from_function(lambda d: curve[:, d.long()], HEADS)


def jumping_table():
    """Whose neighbouring stretches differ much, and begin anywhere among the tiles."""
    levels = 8 * torch.randn(HEADS, 4096 // 50 + 1).double().repeat_interleave(50, 1)
    return biases.DistanceBias.from_function(lambda d: levels[:, d.long()] - 0.02 * d, HEADS)


def falling(gained: bool = False, kernel: str | None = None, rise: float = 0.0):
    def make(n: int) -> biases.CumulativeBias:
        scale = 3.0 if kernel else 0.2
        steps = -scale * torch.rand(2, HEADS, n).double() + rise * torch.randn(2, HEADS, n)
        gain = 2 * torch.rand(2, HEADS, n).double() if gained else None
        return biases.CumulativeBias(steps, gain, kernel)

    return make


def three_levels(n: int) -> biases.CumulativeBias:
    """Sums above, at and below those of the queries."""
    sums = 50.0 * torch.randint(-1, 2, (2, HEADS, n // 20 + 1)).double().repeat_interleave(20, 2)
    sums = sums[:, :, :n]
    sums[:, :, -10:] = 0
    return biases.CumulativeBias(sums.diff(prepend=torch.zeros(2, HEADS, 1)), None, "log1p_square")


def falling_pieces() -> biases.NormalizedBias:
    """A function that is not monotonic, of which distances beyond a few hundred are negligible."""

    def function(x: Tensor) -> Tensor:
        heads = torch.arange(1, HEADS + 1)[:, None]
        return -40 * heads * x**2 + 10 * torch.sin(12 * heads * x)

    return biases.NormalizedBias.from_function(function, HEADS, error=0.3, init_length=60)


class Band:
    """Profiles of 300 distances that raise the nearest keys, or lower them for some queries."""

    def __init__(self, beyond: str, signs: Tensor):
        self.beyond = beyond
        self.factors = signs * (1 + torch.rand(2, HEADS, 5, 3).double())
        heights = 10 + 10 * torch.rand(1, 3, 1)
        self.tables = heights * torch.exp(-torch.arange(300.0).double() / 60)

    def lower(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Form:
        factors = self.factors[:, :, : geometry.query_rows]
        bias = biases.RelativeBias(factors, self.tables, beyond=self.beyond)
        return bias.lower(geometry, dtype, device)


class OfKeys:
    """Vectors of keys, short ones far from the queries, and products that decay with the distance.

    Of rank 1 the bound of the products is tight.
    """

    def __init__(self, n: int, rank: int):
        lengths = 10 * torch.rand(2, HEADS, n // 50 + 1, 1).double().repeat_interleave(50, 2)
        lengths[:, :, n - 200 :] += 12
        self.factors = lengths[:, :, :n] * (0.5 + torch.rand(2, HEADS, n, rank)) / rank
        self.tables = torch.exp(-torch.arange(float(n)).double() / 1000).expand(HEADS, rank, n)
        self.of_queries = Band("last", torch.ones(()))

    def of_tokens(self, tokens: slice) -> OfKeys:
        part = copy.copy(self)
        part.factors = self.factors[:, :, tokens]
        return part

    def lower(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Form:
        n = self.tables.shape[-1]
        bias = biases.RelativeBias(
            self.of_queries.factors[:, :, : geometry.query_rows],
            0.1 * torch.nn.functional.pad(self.of_queries.tables, (0, n - 300)),
            self.factors,
            self.tables,
            beyond="last",
        )
        return bias.lower(geometry, dtype, device)


class OfKeysAlone(OfKeys):
    """The same without a term of queries, with one head of keys and profiles of 300 distances that
    decay unless they end there."""

    def __init__(self, n: int, beyond: str):
        super().__init__(n, 1)
        self.beyond = beyond
        self.factors = self.factors[:, :1]
        decay = 1 / 150 if beyond == "last" else 0.0
        self.tables = 2 * torch.exp(-decay * torch.arange(300.0).double()).expand(HEADS, 1, 300)

    def lower(self, geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Form:
        bias = biases.RelativeBias(
            key_factors=self.factors, key_tables=self.tables, beyond=self.beyond
        )
        return bias.lower(geometry, dtype, device)


BIASES = {
    "numbers of keys": lambda n: OfKeys(n, 1),
    "vectors of keys": lambda n: OfKeys(n, 3),
    "numbers of keys in a band": lambda n: OfKeysAlone(n, "zero"),
    "numbers of keys beyond a table": lambda n: OfKeysAlone(n, "last"),
    "band": lambda n: Band("zero", torch.ones(())),
    "band of both signs": lambda n: Band("last", torch.randn(2, HEADS, 5, 1).sign()),
    "pieces": lambda n: falling_pieces(),
    "slopes": lambda n: steep_slopes(),
    "slopes of both signs": lambda n: mixed_slopes(),
    "type2": lambda n: biases.Type2(HEADS),
    "table": lambda n: wandering_table(),
    "jumping table": lambda n: jumping_table(),
    "sums": falling(),
    "sums that rise at times": falling(rise=0.5),
    "gains": falling(gained=True),
    "log1p_square": falling(gained=True, kernel="log1p_square"),
    "log1p_square on both sides": three_levels,
}


def keys_against(content: str, q: Tensor, n: int) -> Tensor:
    """Keys (2, KV_HEADS, n, DIM) that may lift themselves above near ones for queries q."""
    k = torch.randn(2, KV_HEADS, n, DIM, dtype=q.dtype)
    of_group = q[:, ::2, :1]
    if content == "a common part":
        k += 20 * torch.randn(DIM)
    elif content == "clusters":
        k += 3 * torch.randn(2, KV_HEADS, -(-n // 50), DIM).repeat_interleave(50, 2)[:, :, :n]
    elif content == "a needle":
        at = torch.randint(n, (1,))
        k[:, :, at] = torch.randint(1, 60, (1,)) * of_group / of_group.norm(dim=-1, keepdim=True)
    elif content == "rising with distance":
        k += torch.linspace(6, 0, n, dtype=q.dtype)[:, None] * of_group
    elif content == "short":
        k *= 0.01
    return k


def keys_at_the_limit(q: Tensor, dense: Tensor, tolerance: float, tile_keys: int) -> Tensor:
    """Keys (2, KV_HEADS, n, DIM) of which tile after tile holds about what may just be left out.

    The keys of a tile are the same, the last two hundred are zero, and q is the same for all heads
    and queries of a key head. dense (1 or 2, HEADS or 1, queries, n) is the bias. Of many small
    tiles some may go, of large ones each is too much.
    """
    level = -2.9 if tile_keys < 64 else 1.0
    n = dense.shape[3]
    dense = dense.expand(2, HEADS, -1, -1)
    shares = dense - dense[..., -200:].logsumexp(-1, keepdim=True)
    tiles = [x.logsumexp(-1).unflatten(1, (KV_HEADS, -1)) for x in shares.split(tile_keys, -1)]
    largest = torch.stack([x.amax((2, 3)) for x in tiles], 2)
    spread = random.choice([0.0, 2.0]) * (torch.rand(largest.shape[2], dtype=torch.float64) - 0.5)
    lift = math.log(tolerance) + level + spread - largest
    lift = lift.repeat_interleave(tile_keys, 2)[:, :, :n, None]
    lift[:, :, -200:] = 0
    direction = q[:, :: HEADS // KV_HEADS, :1].double()
    keys = lift * DIM**0.5 * direction / direction.square().sum(-1, keepdim=True)
    return keys.nan_to_num(0, 0, 0).to(q.dtype)


AT_THE_LIMIT = "at the limit"
CONTENTS = ("normal", "a common part", "clusters", "a needle", "rising with distance", "short")


def decoded(
    bias, q, k, tolerance: float, page_size: int, window: int | None, split: int, backend: str
):
    """The last queries over a cache that was filled in some calls: o, lse, and the cache.

    Without a window, other keys stood at first where most of these stand.
    """
    cache = KVCache(2, KV_HEADS, DIM, dtype=q.dtype, page_size=page_size, window=window)
    n, n_query = k.shape[2], q.shape[2]
    kept = 0 if window else split // 3
    parts = [slice(0, split), slice(kept, split), slice(split, n)]
    others = torch.cat([k[:, :, :kept], 0.01 * k[:, :, kept:]], 2)
    with torch.no_grad():
        for number, part in enumerate(parts):
            given = bias
            if isinstance(bias, biases.CumulativeBias):
                gain = None if bias.gain is None else bias.gain[..., part]
                given = replace(bias, steps=bias.steps[..., part], gain=gain)
            elif isinstance(bias, OfKeys):
                given = bias.of_tokens(part)
            last = q if part.stop == n else q[:, :, :0]
            new = (others if number == 0 else k)[:, :, part]
            o, lse = biased_flash_attn_with_kvcache(
                last,
                cache,
                new,
                new,
                given,
                tolerance=tolerance,
                return_lse=True,
                backend=backend,
            )
            if number == 0:
                cache.truncate(kept)
    assert o.shape[2] == n_query
    return o, lse, cache


# Whether the first tile of 4000 keys can go.
CAN_GO = {
    **dict.fromkeys(("band", "slopes", "type2", "table", "sums"), True),
    **dict.fromkeys((name for name in BIASES if "of keys" in name), True),
    **dict.fromkeys(("slopes of both signs", "log1p_square"), False),
}


def attend_again(bias, q, cache, backend: str) -> Tensor:
    """The lse of queries that the cache has seen."""
    if isinstance(bias, biases.CumulativeBias):
        gain = None if bias.gain is None else bias.gain[..., -q.shape[2] :]
        bias = replace(bias, steps=bias.steps[..., :0], gain=gain)
    elif isinstance(bias, OfKeys):
        bias = bias.of_tokens(slice(0, 0))
    options = {"tolerance": 2.0**-12, "return_lse": True, "backend": backend}
    with torch.no_grad():
        return biased_flash_attn_with_kvcache(q, cache, bias=bias, **options)[1]


def check_tolerance(
    name: str,
    content: str,
    lengths: tuple[int, int],
    tolerance: float,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    backend: str,
) -> bool:
    """Of random queries and keys no more is left out than float64 allows; whether something is.

    float32 may be off by roundings of logits.
    """
    n_query, n = lengths
    bias = BIASES[name](n)
    geometry = Geometry(n_query, n, True, window)
    with torch.no_grad():
        dense = bias.lower(geometry, torch.float64, None).dense(geometry)
    if content == AT_THE_LIMIT:
        q = torch.randn(2, KV_HEADS, 1, DIM, dtype=dtype).repeat_interleave(HEADS // KV_HEADS, 1)
        q = q.repeat(1, 1, n_query, 1)
        seen = dense.masked_fill(~geometry.visible(), -torch.inf)
        k = keys_at_the_limit(q, seen, tolerance, min(64, page_size))
    else:
        q = torch.randn(2, HEADS, n_query, DIM, dtype=dtype)
        k = keys_against(content, q, n)
    arguments = (page_size, window, n - n_query, backend)
    o, lse, _ = decoded(bias, q, k, tolerance, *arguments)
    whole_o, whole_lse, _ = decoded(bias, q, k, 0.0, *arguments)
    keys = k.double().repeat_interleave(2, 1).mT
    s = DIM**-0.5 * q.double() @ keys + dense
    s = s.masked_fill(~geometry.visible(), -torch.inf)
    exact, rounding = s.logsumexp(-1), 1e-9
    if dtype == torch.float32:
        # Of the products, and of biases that count.
        counts = s[s > exact[..., None] - 20].abs().max()
        products = (DIM**-0.5 * q.double().abs() @ keys.abs()).max()
        rounding = 1e-6 * (1 + float(products + counts))
    assert (whole_lse - exact).abs().max() <= rounding
    assert (exact - lse).expm1().max() <= tolerance * (1 + 1e-9) + rounding
    spread = (k.amax(2) - k.amin(2)).repeat_interleave(2, 1)[:, :, None]
    allowed = tolerance * spread + rounding * k.abs().amax()
    assert ((o - whole_o).abs() <= allowed + 1e-9).all()
    return bool((lse < whole_lse - 1e-13).any())


def check_first_tile(name: str, dtype: torch.dtype, backend: str) -> None:
    """It is read where it may matter, and only there."""
    n, n_query = 4000, 2
    bias = BIASES[name](n)
    q = torch.randn(2, HEADS, n_query, DIM).to(dtype)
    k = torch.randn(2, KV_HEADS, n, DIM).to(dtype)
    _, lse, cache = decoded(bias, q, k, 2.0**-12, 64, None, n - n_query, backend)
    page, _ = cache.table.find(torch.tensor([[0], [1]]), torch.arange(0, 64))
    cache.k[page] = torch.nan
    assert torch.equal(attend_again(bias, q, cache, backend), lse) == CAN_GO[name]


def check_bounds_of_an_earlier_bias(backend: str) -> None:
    """Those of its steps are not those of a bias without steps, which the same keys may have later.

    All keys count for the second bias, which rises with the distance, and few for the first.
    """
    n = 2000
    first = falling()(n)
    q, k = torch.randn(2, HEADS, 1, DIM), 0.1 * torch.randn(2, KV_HEADS, n, DIM)
    cache = KVCache(2, KV_HEADS, DIM)
    second = biases.DistanceBias.from_function(lambda d: 0.01 * d.expand(HEADS, -1), HEADS)
    with torch.no_grad():
        biased_flash_attn_with_kvcache(q, cache, k, k, first, backend=backend)
        options = {"bias": second, "return_lse": True, "backend": backend}
        _, lse = biased_flash_attn_with_kvcache(q, cache, tolerance=2.0**-12, **options)
        _, whole = biased_flash_attn_with_kvcache(q, cache, tolerance=0.0, **options)
    assert (whole - lse).expm1().max() <= 2.0**-12


def check_infinity(place: str, value: float, backend: str) -> None:
    """It is found among far keys, whatever the bias leaves of them."""
    n = 4000
    q, k = torch.rand(2, HEADS, 1, DIM), torch.randn(2, KV_HEADS, n, DIM)
    v = k.clone()
    (k if place == "k" else v)[0, 0, 77, 3] = value
    cache = KVCache(2, KV_HEADS, DIM)
    bias = biases.ALiBi(HEADS)
    with torch.no_grad():
        o = biased_flash_attn_with_kvcache(q, cache, k, v, bias, backend=backend)
        whole = biased_flash_attn_with_kvcache(q, cache, bias=bias, backend=backend, tolerance=0.0)
    assert not whole[0, :2].isfinite().all()
    assert torch.equal(o.isfinite(), whole.isfinite())
