"""What flash-attn's tests have in common: their options, naive attention, and the rule that errors
against float64 are at most a few times those of naive attention in the same dtype."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from itertools import product
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .counting import sampled

FILE = "tests/test_flash_attn.py"
# Naive attention in half precision is slow for more pairs of a query and a key.
FEW_PAIRS = 60_000
BOTH = [False, True]
DTYPES = [torch.float16, torch.bfloat16]
OPTIONS = {
    "dropout_p": [0.0, 0.17],
    "causal": BOTH,
    "local": BOTH,
    "alibi": BOTH,
    "deterministic": BOTH,
    "dtype": DTYPES,
}
DIMS = [32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256]
# Fewer than the original's 4 to 12: the numbers of heads of queries and of keys.
HEADS = {"mha": (3, 3), "gqa": (6, 3), "mqa": (3, 1)}


class Rule(NamedTuple):
    """The largest errors, as keyword arguments of `oracle.assert_within`."""

    factor: float = 2
    atol: float = 0.0
    of_gradients: tuple[float, float] = (2, 0.0)


@dataclass(frozen=True)
class Case:
    """A case of `test`. Options that the test does not have are those of its function."""

    test: str
    lengths: tuple[int, int]  # of queries and keys
    dim: int
    dtype: torch.dtype
    causal: bool
    local: bool = False
    alibi: bool = False
    deterministic: bool = False
    dropout_p: float = 0.0
    softcap: float = 0.0
    heads: str = "mha"
    packed: str = ""

    def __str__(self) -> str:
        """The values, where options that are on are their names, and those that are off nothing."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        parts = [name if value is True else value for name, value in named if value]
        return "-".join(str(part).removeprefix("torch.") for part in parts)

    @property
    def refused(self) -> str:
        return "dropout" if self.dropout_p else "capped logits" if self.softcap else ""

    @property
    def pairs(self) -> int:
        return self.lengths[0] * self.lengths[1]

    @property
    def batch(self) -> int:
        """Fewer than the originals' 1 to 60, but more of the shortest, where the largest error of
        few numbers would depend on chance."""
        return max(2, 32 // max(self.lengths))

    @property
    def own(self) -> dict:
        """The arguments that naive attention does not have."""
        names = "dropout_p", "softcap", "deterministic"
        return {name: getattr(self, name) for name in names}

    def draw(self) -> dict:
        """Those that it has, at random."""
        left, right = torch.randint(self.lengths[1], (2,)).tolist()
        slopes = 0.3 * torch.rand(self.batch, HEADS[self.heads][0])
        return {
            "causal": self.causal,
            "window_size": (left, right) if self.local else (-1, -1),
            "alibi_slopes": slopes if self.alibi else None,
        }

    def tensors(self, n_query: tuple[int, ...], n_key: tuple[int, ...]) -> list[Tensor]:
        """q, k and v with these numbers of queries and of keys, or with these and a batch size."""
        heads, kv_heads = HEADS[self.heads]
        shapes = [(*n_query, heads), (*n_key, kv_heads), (*n_key, kv_heads)]
        return [torch.randn(*shape, self.dim).to(self.dtype) for shape in shapes]


Described = TypeVar("Described", bound=Case)


def products(make: Callable[..., Described], test: str, **values: list) -> list[Described]:
    """The cases of a test with all combinations of values, except for those that it skips."""
    rows = (dict(zip(values, row, strict=True)) for row in product(*values.values()))
    cases = (make(test=test, **row) for row in rows)
    return [case for case in cases if not (case.dropout_p and case.softcap)]


def samples(cases: Iterable[Described], among: int = 500) -> list[Described]:
    """Those that are compared of each test; few of the `among` cases that are drawn first."""
    by_test = defaultdict(list)
    for case in cases:
        by_test[case.test].append(case)
    rows = (sampled(rows, test, alone="dim", among=among) for test, rows in by_test.items())
    return [case for row in rows for case in row]


def swapped(lengths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The lengths, and those with queries and keys exchanged."""
    return lengths + [(m, n) for n, m in lengths]


# Of the tests whose names have "causal" or "deterministic".
FEW = {
    "lengths": swapped(
        [
            *((1, 239), (3, 799), (127, 512), (127, 513), (113, 203), (128, 217), (113, 211)),
            *((108, 256), (256, 512), (1023, 1024)),
        ]
    ),
    "dim": DIMS,
    "local": BOTH,
    "dtype": DTYPES,
}


def page_table(batch: int, columns: int) -> Tensor:
    """The pages of each sequence, three times as many columns of them as are needed."""
    return torch.randperm(3 * batch * columns, dtype=torch.int32).view(batch, -1)


def naive(q: Tensor, k: Tensor, v: Tensor, causal: bool, window_size, alibi_slopes) -> Tensor:
    """Attention in the dtype of q; the last query is aligned with the last key."""
    group, n_query, n_key = q.shape[2] // k.shape[2], q.shape[1], k.shape[1]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    d = torch.arange(n_query)[:, None] + n_key - n_query - torch.arange(n_key)
    s = torch.einsum("bihd,bjhd->bhij", q * q.shape[-1] ** -0.5, k)
    if alibi_slopes is not None:
        s = s - (alibi_slopes[..., None, None] * d.abs()).to(s.dtype)
    left, right = window_size
    hidden = torch.zeros_like(d, dtype=torch.bool)
    if causal:
        hidden |= d < 0
    if left != -1:
        hidden |= (d > left) | (d < -right)
    p = s.masked_fill(hidden, -torch.inf).softmax(-1).masked_fill(hidden.all(1)[:, None], 0)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def naive_of_each(q: list[Tensor], k: list[Tensor], v: list[Tensor], options: dict) -> list[Tensor]:
    """The same for sequences of several lengths, (n, heads, dim) each."""
    slopes = options["alibi_slopes"]
    outputs = []
    for b, qkv in enumerate(zip(q, k, v, strict=True)):
        own = options | {"alibi_slopes": None if slopes is None else slopes[b : b + 1]}
        outputs.append(naive(*(x[None] for x in qkv), **own)[0])
    return outputs


def assert_repeated(attend: Callable[..., Tensor], inputs: list[Tensor], times: int = 3) -> None:
    """As many further calls (the originals have 50 or 250) have equal results and gradients."""
    leaves = [x.requires_grad_() for x in inputs]
    o = attend(*leaves)
    cotangent = torch.randn_like(o)
    first = o, *torch.autograd.grad(o, leaves, cotangent)
    for _ in range(times):
        o = attend(*leaves)
        again = o, *torch.autograd.grad(o, leaves, cotangent)
        assert all(map(torch.equal, again, first))
