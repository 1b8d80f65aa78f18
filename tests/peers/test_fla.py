"""flash-linear-attention, tests/ops/test_{forgetting_attn,attn,attn_gluon}.py: forget gates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from biased_flash_attn import biased_flash_attn, biased_flash_attn_varlen, biases
from biased_flash_attn.validation import MAX_HEAD_DIM

from .oracle import assert_near, attention, below_diagonal

PEER = ("flash-linear-attention", "tests/ops/test_{forgetting_attn,attn,attn_gluon}.py")
WIDE = f"heads wider than {MAX_HEAD_DIM}"
NO_KEYS = "windows without keys"
STRIDED = "channels that are not contiguous"
HALF, BFLOAT = torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    test: str
    batch: int  # 0 for packed sequences
    lengths: tuple[int, ...]
    heads: tuple[int, int]  # of keys and of queries
    dims: tuple[int, int]
    window: int | None = None
    gates: str = ""  # how they are drawn
    sink: bool = False
    dtype: torch.dtype = HALF
    scale: float | None = None
    layout: str = ""
    backward: bool = True

    def __str__(self) -> str:
        lengths, dims = ("x".join(map(str, x)) for x in (self.lengths, self.dims))
        parts = [self.test, f"{self.batch or 'packed'}", lengths, self.heads, dims]
        parts += [f"window{self.window}", self.gates or "ungated", "sink" * self.sink]
        return "-".join(map(str, (*parts, str(self.dtype).removeprefix("torch."))))

    @property
    def refused(self) -> str:
        if max(self.dims) > MAX_HEAD_DIM:
            return WIDE
        if self.layout == "strided":
            return STRIDED
        return NO_KEYS if self.window == 0 else ""

    @property
    def decoding(self) -> bool:
        return self.test == "decoding"

    @property
    def effective_scale(self) -> float:
        return self.dims[0] ** -0.5 if self.scale is None else self.scale


# The batch, length, heads and head_dim, and the scale or the window.
SHAPES = [
    ((1, (63,), (1, 1), (64, 64)), 1.0, 16),
    ((3, (111,), (2, 2), (100, 100)), 1.0, 32),
    ((3, (1024,), (2, 8), (60, 60)), 0.1, None),
    ((3, (1024,), (2, 8), (128, 128)), 0.1, 64),
    ((4, (2048,), (2, 8), (64, 64)), 0.1, None),
]
PACKED = [
    (0, (15,), (2, 2), (64, 64)),
    (0, (256, 244, 500), (2, 8), (64, 64)),
    (0, (15, 85, 200, 900, 800), (2, 2), (100, 100)),
]
WINDOWED = [(shape, window) for shape, _, window in SHAPES if window]


def forgetting() -> Iterator[Case]:
    for shape, scale, _ in SHAPES:
        yield Case("forgetting", *shape, gates="small", scale=scale)
    for shape in PACKED:
        yield Case("forgetting", *shape, gates="small")
    for shape, window in WINDOWED:
        yield Case("forgetting", *shape, window, gates="small")


def attn() -> Iterator[Case]:
    for shape, scale, _ in [*SHAPES, ((2, (256,), (2, 2), (128, 128)), 0.1, None)]:
        yield Case("attn", *shape, scale=scale)
    for shape, scale, _ in SHAPES[:3]:
        yield Case("attn", *shape, gates="normal", scale=scale)
    yield from (Case("attn", *shape) for shape in PACKED)
    yield from (Case("attn", *shape, window) for shape, window in WINDOWED)
    yield from (Case("attn", *shape, sink=True) for shape, _ in WINDOWED)
    yield Case("attn", 0, (111,), (2, 2), (64, 64), 16)
    yield Case("attn", 0, (256, 244, 500), (2, 8), (100, 100), 32)
    for dim, n in itertools.product((64, 100, 128), (15, 200)):
        yield Case("attn_forward", 0, (n, n), (2, 2), (dim, dim), backward=False)


def gluon() -> Iterator[Case]:
    def of(test: str, packed: bool, n: int, *args, batch: int = 1, **options) -> Case:
        lengths = (15, 64, 0, n - 79) if packed else (n,)
        return Case(test, 0 if packed else batch, lengths, *args, **options)

    both, gated = (False, True), {"gates": "small", "sink": True}
    dims = (64, 64)
    for dtype, packed, gates, sink, window, heads in itertools.product(
        (HALF, BFLOAT), both, ("", "small"), both, (None, 17), (2, 8)
    ):
        options = {"gates": gates, "sink": sink, "dtype": dtype, "batch": 2}
        yield of("gluon", packed, 257, (2, heads), dims, window, **options)
    for packed, dim in itertools.product(both, (128, 512)):
        yield of("copies", packed, 257, (2, 4), (dim, dim), 127, dtype=BFLOAT, **gated)
    yield Case("indices", 0, (65, 192), (2, 2), (128, 128))
    for dtype, (dims, n, packed) in itertools.product((HALF, BFLOAT), DIMENSIONS):
        yield of("dims", packed, n, (1, 4), dims, 65, dtype=dtype, **gated)
    for window, packed in itertools.product((0, 1, 63, 64, 65, 1024), both):
        yield of("window", packed, 257, (1, 4), (128, 128), window, **gated)
    yield of("strided", True, 257, (1, 4), (100, 64), layout="strided", **gated)
    for batch, lengths in ((1, (257,)), (0, (63, 194))):
        yield Case("parity", batch, lengths, (1, 4), (128, 128), 65, **gated)
    for dims in ((1, 3), (65, 127), (64, 64), (100, 60), (256, 512), (512, 256), (512, 512)):
        case = Case("decoding", 0, (0, 257, 1, 2053), (1, 4), dims, backward=False, **gated)
        for dtype, window in itertools.product((HALF, BFLOAT), (None, 0, 65)):
            yield replace(case, dtype=dtype, window=window)
    yield Case("fallback", 1, (127,), (1, 1), (64, 64))
    yield Case("unaligned", 1, (127,), (1, 1), (64, 64), layout="unaligned")


DIMENSIONS = [
    *(((1, 3), 111, False), ((65, 127), 257, True), ((16, 16), 111, False)),
    *(((60, 100), 127, False), ((100, 60), 257, True), ((128, 128), 511, False)),
    *(((192, 128), 257, True), ((256, 256), 257, False), ((256, 256), 257, True)),
    *(((128, 320), 257, True), ((256, 512), 257, False), ((320, 128), 257, True)),
    *(((512, 256), 257, False), ((512, 512), 257, False), ((512, 512), 257, True)),
]
CASES = [*forgetting(), *attn(), *gluon()]


def naive(case: Case, q: Tensor, k: Tensor, v: Tensor, g: Tensor, sink: Tensor) -> Tensor:
    """q (n, H, D) of one sequence, whose last query is at the last key; g (m, H), the logarithms of
    the factors by which each token weakens all before it; a sink, one of (n, H), is a key with a
    value of 0."""
    n, m = len(q), len(k)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    added = below_diagonal(n, m, m - n).expand(q.shape[0], -1, -1)
    if case.window is not None:
        near = below_diagonal(n, m, m - n - case.window) < 0
        added = added.masked_fill(~near, -torch.inf)
    if case.gates:
        total = g.mT.cumsum(-1)
        added = added + total[:, m - n :, None] - total[:, None]
    if case.sink:
        added = torch.cat([added, sink.mT[..., None]], -1)
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    return attention(q, k, v, added, case.effective_scale).transpose(0, 1)


def exactly(case: Case, q: Tensor, k: Tensor, v: Tensor, g: Tensor, sink: Tensor) -> Tensor:
    """Attention in float64, in each sequence or batch entry alone."""
    sequences = case.lengths * max(1, case.batch)
    queries = [1] * len(sequences) if case.decoding else sequences
    tensors = [x.double().flatten(0, 1) for x in (q, k, v, g, sink)]
    sizes = [[*queries], *[[*sequences]] * 3, [*queries]]
    parts = zip(*(x.split(n) for x, n in zip(tensors, sizes, strict=True)), strict=True)
    o = torch.cat([naive(case, *x) for x in parts if len(x[1])])
    return torch.cat([o.new_zeros(1, *o.shape[1:]), o]) if case.decoding else o


def starts(lengths) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def ours(case: Case, q: Tensor, k: Tensor, v: Tensor, g: Tensor, sink: Tensor) -> Tensor:
    """q (B, N, H, D), with one sequence after another where the batch is packed."""
    bias = biases.CumulativeBias(g.mT) if case.gates else None
    options = {"window": case.window, "scale": case.scale, "return_lse": True}
    if case.batch:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o, lse = biased_flash_attn(q, k, v, bias, **options)
        o, lse = o.transpose(1, 2), lse.mT
    else:
        queries = [1] * len(case.lengths) if case.decoding else case.lengths
        offsets = starts(queries), starts(case.lengths)
        o, lse = biased_flash_attn_varlen(q[0], k[0], v[0], *offsets, bias, **options)
        o, lse = o[None], lse.mT[None]
    if case.sink:
        o = (o * torch.sigmoid(lse - sink)[..., None]).to(o.dtype)  # the product is in float32
    return o.flatten(0, 1)


def drawn(case: Case) -> list[Tensor]:
    """q, k, v, gates and sinks. One step of decoding scales its gates like its logits."""
    (kv_heads, heads), (dim, value_dim), batch = case.heads, case.dims, max(1, case.batch)
    n_key = sum(case.lengths)
    n_query = len(case.lengths) if case.decoding else n_key
    shapes = [(n_query, heads, dim), (n_key, kv_heads, dim), (n_key, kv_heads, value_dim)]
    qkv = [torch.randn(batch, *shape).to(case.dtype) for shape in shapes]
    if case.layout == "unaligned":
        qkv = [pad(x.flatten(), (1, 0))[1:].view(x.shape) for x in qkv]
    g = torch.randn(batch, n_key, heads)
    if case.gates == "small":
        g = g.uniform_(-0.1, -0.01)
    if case.test in ("forgetting", "attn", "decoding"):
        g = g.to(case.dtype)
    sink = torch.randn(heads).expand(batch, n_query, heads)
    return [*qkv, g * case.effective_scale if case.decoding else g, sink]


def slow(case: Case) -> bool:
    return case.heads[1] * max(1, case.batch) * sum(n * n for n in case.lengths) > 10**7


SERVED = [
    pytest.param(case, marks=[pytest.mark.slow] * slow(case), id=str(case))
    for case in CASES
    if not case.refused
]


@pytest.mark.parametrize("case", SERVED)
def test_forget_gates(case):
    """The gradients of sinks are compared for each query, as those of all queries cancel."""
    inputs = [x.requires_grad_(case.backward) for x in drawn(case)]
    o, exact = (f(case, *inputs) for f in (ours, exactly))
    assert_near(o, exact, 0.005, "output")
    if case.backward:
        used = {"q": True, "k": True, "v": True, "gates": bool(case.gates), "sinks": case.sink}
        leaves = {name: x for (name, given), x in zip(used.items(), inputs, strict=True) if given}
        cotangent = torch.randn_like(o)
        gradients = torch.autograd.grad(o, [*leaves.values()], cotangent)
        expected = torch.autograd.grad(exact, [*leaves.values()], cotangent.double())
        for name, actual, wanted in zip(leaves, gradients, expected, strict=True):
            assert_near(actual, wanted.double(), 0.005, f"gradient of {name}")


def one(**options) -> list[Tensor]:
    case = Case("attn", 1, (3,), (1, 1), (8, 8), gates="small")
    return [case := replace(case, **options), *drawn(case)]


def test_heads_wider_than_the_limit_are_refused():
    with pytest.raises(ValueError, match=rf"v has head_dim {MAX_HEAD_DIM + 1}; it may be 1 to"):
        ours(*one(dims=(8, MAX_HEAD_DIM + 1)))


@pytest.mark.parametrize("batch", [0, 1])
def test_windows_without_keys_are_refused(batch):
    with pytest.raises(ValueError, match=r"window is 0; it must be None or a positive int"):
        ours(*one(batch=batch, window=0))


def test_channels_that_are_not_contiguous_are_refused():
    case, q, k, v, g, sink = one()
    q = torch.stack([q, q], -1)[..., 0]
    with pytest.raises(ValueError, match=r"q has stride 2 in its last.*pass q\.contiguous\(\)"):
        ours(case, q, k, v, g, sink)
