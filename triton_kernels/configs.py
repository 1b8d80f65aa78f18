"""Sizes of blocks, by processor, head width, direction and bias. Nothing is tuned at call time.

Those of half precision for heads up to 128 come from bench/configurations.py, which compiles and
estimates, and from trials beside it; the others are the largest tried that spill no registers. None
was timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

# Rows or columns of a tile: offsets within it and margins of tables are made for as many.
LARGEST_TILE = 128


@dataclass(frozen=True)
class Config:
    """A block of queries, a tile of keys, and how a processor runs them.

    ahead: whether the product of a bias's factors is computed a tile before it is needed.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 1
    ahead: bool = False

    def __post_init__(self):
        if max(self.block_m, self.block_n) > LARGEST_TILE:
            raise ValueError(f"{self} has a tile of more than {LARGEST_TILE} rows or columns")


@dataclass(frozen=True)
class Row:
    """The configurations for a width, and those of heavy problems where they differ."""

    forward: Config
    backward_queries: Config
    backward_keys: Config
    backward_table: Config
    heavy_forward: Config | None = None
    heavy_backward_queries: Config | None = None
    heavy_backward_keys: Config | None = None
    heavy_backward_table: Config | None = None
    # Which problems are heavy beside those with an outer function, by the field that serves them.
    heavy: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Whether gradients of sums make that of keys heavy.
    heavy_sums: bool = False
    # Where warp groups multiply beside other work, the bias of a tile is computed ahead, but for
    # problems that leave too few registers, named as heavy ones are.
    ahead: bool = False
    late: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Those of float16, whose dS is multiplied in two parts, by field and problem.
    in_float16: Mapping[tuple[str, str], Config] = field(default_factory=dict)


# Problems as Kind names them.
_SUMS = ("cumulative-plan", "cumulative-gain-plan")
_GAINS = ("cumulative-gain", "cumulative-gain-plan")
_PLANS = ("linear-plan", "distance-plan", *_SUMS)
_WIDEST = Row(
    forward=Config(64, 32, 8, 1),
    backward_queries=Config(32, 32, 8, 1),
    backward_keys=Config(32, 32, 8, 1),
    heavy_backward_keys=Config(16, 32, 8, 1),
    backward_table=Config(16, 16, 4, 1),
    heavy={"backward_keys": _PLANS},
    heavy_sums=True,
)
# By the widest head they serve; no head is wider than 256.
AMPERE = {
    64: Row(
        forward=Config(128, 128, 8, 2),
        heavy_forward=Config(128, 64, 8, 2),
        backward_queries=Config(128, 64, 8, 2),
        backward_keys=Config(64, 64, 8, 2),
        heavy_backward_keys=Config(32, 128, 8, 2),
        backward_table=Config(64, 64, 8, 2),
        heavy_backward_table=Config(32, 32, 4, 1),
        heavy={
            "forward": ("distance-plan", *_SUMS),
            "backward_keys": _GAINS,
        },
        in_float16={("backward_keys", "cumulative"): Config(32, 128, 8, 2)},
    ),
    128: Row(
        forward=Config(64, 64, 4, 2),
        backward_queries=Config(128, 32, 8, 2),
        backward_keys=Config(32, 64, 8, 2),
        heavy_backward_keys=Config(16, 64, 8, 1),
        backward_table=Config(32, 32, 4, 1),
        heavy={"backward_keys": _PLANS},
        heavy_sums=True,
    ),
    256: replace(_WIDEST, heavy_forward=Config(64, 64, 8, 1)),
}
HOPPER = {
    64: Row(
        forward=Config(128, 128, 8, 2),
        backward_queries=Config(128, 128, 8, 2),
        heavy_backward_queries=Config(128, 64, 8, 2),
        backward_keys=Config(64, 128, 8, 2),
        heavy_backward_keys=Config(32, 64, 4, 2),
        backward_table=Config(64, 64, 4, 2),
        heavy={"backward_queries": ("cumulative-gain-plan",)},
        ahead=True,
        in_float16={
            ("backward_queries", "linear"): Config(128, 64, 8, 2),
            ("backward_queries", "linear-plan"): Config(128, 64, 8, 2),
            ("backward_queries", "cumulative-gain"): Config(128, 64, 8, 2),
        },
    ),
    128: Row(
        forward=Config(128, 128, 8, 2),
        heavy_forward=Config(128, 64, 8, 2),
        backward_queries=Config(128, 64, 8, 2),
        heavy_backward_queries=Config(128, 32, 8, 2),
        backward_keys=Config(32, 128, 8, 2),
        heavy_backward_keys=Config(16, 128, 8, 1),
        backward_table=Config(64, 64, 4, 1),
        heavy_backward_table=Config(64, 64, 8, 1),
        heavy={"forward": ("distance-plan",)},
        ahead=True,
        late={
            "forward": ("linear-plan", *_SUMS),
            "backward_queries": _SUMS,
            "backward_keys": _SUMS,
        },
        in_float16={
            ("forward", "cumulative-gain-plan"): Config(128, 64, 8, 2),
            ("backward_queries", "cumulative-gain-plan"): Config(128, 32, 8, 2),
            ("backward_keys", "cumulative-gain"): Config(32, 128, 8, 2),
        },
    ),
    256: _WIDEST,
}
BLACKWELL = {
    64: Row(
        forward=Config(128, 128, 8, 2),
        heavy_forward=Config(128, 64, 8, 1),
        backward_queries=Config(128, 32, 8, 2),
        heavy_backward_queries=Config(64, 64, 8, 1),
        backward_keys=Config(32, 128, 8, 2),
        backward_table=Config(64, 64, 4, 2),
        heavy={
            "forward": ("distance-plan", *_SUMS),
            "backward_queries": ("distance-plan", *_SUMS),
        },
        in_float16={("backward_keys", name): Config(32, 64, 8, 2) for name in _GAINS},
    ),
    128: Row(
        forward=Config(128, 64, 8, 2),
        backward_queries=Config(128, 64, 8, 2),
        heavy_backward_queries=Config(128, 32, 8, 2),
        backward_keys=Config(16, 64, 4, 1),
        backward_table=Config(64, 64, 4, 1),
        heavy_backward_table=Config(64, 64, 8, 1),
    ),
    256: _WIDEST,
}
# Sequences that are ranges of rows have lengths and addresses of their own, which take registers.
OF_SEQUENCES = {
    64: replace(
        AMPERE[64],
        forward=Config(128, 64, 8, 2),
        backward_keys=Config(32, 128, 8, 1),
        heavy_backward_keys=None,
        in_float16={},
    ),
    128: Row(
        forward=Config(64, 64, 4, 2),
        backward_queries=Config(128, 32, 8, 1),
        heavy_backward_queries=Config(128, 16, 8, 1),
        backward_keys=Config(16, 64, 8, 1),
        backward_table=Config(64, 64, 8, 1),
        heavy={"backward_queries": _PLANS},
    ),
    256: replace(_WIDEST, forward=Config(64, 16, 8, 1), backward_keys=Config(16, 32, 8, 1)),
}
OF_SEQUENCES_ON_AMPERE = OF_SEQUENCES | {
    128: replace(
        OF_SEQUENCES[128],
        backward_queries=Config(128, 16, 8, 1),
        backward_table=Config(32, 32, 4, 1),
    )
}
OF_SEQUENCES_ON_BLACKWELL = OF_SEQUENCES | {
    64: replace(
        OF_SEQUENCES[64],
        forward=Config(64, 64, 4, 2),
        heavy_forward=None,
        backward_queries=Config(128, 32, 8, 2),
        heavy_backward_queries=Config(64, 64, 4, 1),
        backward_keys=Config(32, 64, 4, 1),
        heavy={"backward_queries": _GAINS},
    ),
    128: replace(
        OF_SEQUENCES[128],
        forward=Config(128, 32, 8, 2),
        backward_queries=Config(64, 32, 4, 1),
        backward_keys=Config(16, 64, 4, 1),
    ),
}
SINGLE = {
    64: Row(
        forward=Config(32, 32),
        backward_queries=Config(32, 32),
        backward_keys=Config(32, 32),
        heavy_backward_keys=Config(16, 32),
        backward_table=Config(32, 32),
    ),
    128: Row(
        forward=Config(16, 32, 8),
        heavy_forward=Config(16, 16, 8),
        backward_queries=Config(16, 32, 8),
        backward_keys=Config(16, 32, 8),
        heavy_backward_keys=Config(16, 16, 8),
        backward_table=Config(32, 32, 8),
        heavy={"forward": ("distance-plan", *_GAINS), "backward_keys": _GAINS},
    ),
    256: Row(
        forward=Config(16, 32, 8),
        heavy_forward=Config(16, 16, 8),
        backward_queries=Config(16, 16),
        backward_keys=Config(16, 16, 8),
        backward_table=Config(16, 16),
        heavy={"forward": ("distance-plan", *_GAINS)},
    ),
}
# Small, so that short sequences have many blocks.
INTERPRETED = Row(Config(32, 16), Config(32, 16), Config(16, 32), Config(32, 32), ahead=True)


@dataclass(frozen=True)
class Kind:
    """What of a problem decides how many registers it takes."""

    form: str
    with_gain: bool = False
    planned: bool = False
    trained: bool = False  # whether gradients of sums are computed

    @property
    def name(self) -> str:
        return self.form + "-gain" * self.with_gain + "-plan" * self.planned


def choose(
    kernel: str,
    arch: int | str,
    dtype: torch.dtype,
    width: int,
    kind: Kind,
    with_sequences: bool = False,
) -> Config:
    """For the field `kernel` of a row, width being the larger of q's and v's padded head_dim."""
    row = INTERPRETED
    if arch != "interpreter":
        table = SINGLE if dtype == torch.float32 else _of_processor(arch, with_sequences)
        row = table[min(widest for widest in table if width <= widest)]
    if dtype == torch.float16 and (kernel, kind.name) in row.in_float16:
        return row.in_float16[kernel, kind.name]
    heavy = _is_heavy(kernel, row, kind) and getattr(row, f"heavy_{kernel}", None)
    late = kind.name in row.late.get(kernel, ())
    return replace(heavy or getattr(row, kernel), ahead=row.ahead and not late)


def sum_columns(arch: int | str) -> int:
    """Of a bias's factors, the columns that sums of gradients take: as few as matrix units allow.

    Blackwell's multiply 128 rows with 16 columns at least, and AMD's any rows.
    """
    return 8 if isinstance(arch, int) and arch < 100 else 16


def _is_heavy(kernel: str, row: Row, kind: Kind) -> bool:
    """Whether registers are taken that most problems leave to larger blocks."""
    if kernel == "backward_table":
        return kind.planned
    heavy = kind.form == "log1p_square" or kind.name in row.heavy.get(kernel, ())
    return heavy or (kernel == "backward_keys" and kind.trained and row.heavy_sums)


def _of_processor(arch: int | str, with_sequences: bool) -> dict[int, Row]:
    """Those of half precision. Processors with names are AMD's, for which nothing was searched."""
    tables = AMPERE, HOPPER, BLACKWELL
    if with_sequences:
        tables = OF_SEQUENCES_ON_AMPERE, OF_SEQUENCES, OF_SEQUENCES_ON_BLACKWELL
    if not isinstance(arch, int) or arch < 90:
        return tables[0]
    return tables[1] if arch < 100 else tables[2]
