"""Sizes of blocks, by processor, head width, direction and problem. Nothing is tuned at call time.

Those of half precision for heads up to 128 come from bench/configurations.py, which compiles and
estimates, and from trials beside it; the others are the largest tried that spill no registers. None
was timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from .processors import Family, Processor

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


# By lists of problems, in words of Kind: the first that names a problem serves it. "" names all.
Choices = Mapping[str, Config]


@dataclass(frozen=True)
class Row:
    """The configurations for a width of a head."""

    forward: Choices
    backward_queries: Choices
    backward_keys: Choices
    backward_table: Choices


_WIDEST = Row(
    forward={"": Config(64, 32, 8)},
    backward_queries={"linear noncausal": Config(32, 32), "": Config(32, 32, 8)},
    backward_keys={
        "log1p_square, linear plan, distance plan, cumulative plan, trained": Config(16, 32, 8),
        "": Config(32, 32, 8),
    },
    backward_table={"": Config(16, 16)},
)
# By the widest head they serve; no head is wider than 256.
AMPERE = {
    64: Row(
        forward={
            "cumulative gain noncausal": Config(128, 32, 8, 2),
            "log1p_square, distance plan, cumulative plan": Config(128, 64, 8, 2),
            "": Config(128, 128, 8, 2),
        },
        backward_queries={
            "log1p_square noncausal, log1p_square window": Config(128, 32, 8, 2),
            "": Config(128, 64, 8, 2),
        },
        backward_keys={
            "cumulative float16, cumulative window, cumulative plan": Config(32, 128, 8, 2),
            "log1p_square, cumulative gain": Config(32, 128, 8, 2),
            "": Config(64, 64, 8, 2),
        },
        backward_table={"plan": Config(32, 32), "": Config(64, 64, 8, 2)},
    ),
    128: Row(
        forward={
            "noncausal window, noncausal plan": Config(64, 32, 4, 2),
            "": Config(64, 64, 4, 2),
        },
        backward_queries={"": Config(128, 32, 8, 2)},
        backward_keys={
            "log1p_square, plan, trained": Config(16, 64, 8),
            "": Config(32, 64, 8, 2),
        },
        backward_table={"": Config(32, 32)},
    ),
    256: replace(_WIDEST, forward={"log1p_square": Config(64, 64, 8), "": Config(64, 32, 8)}),
}
HOPPER = {
    64: Row(
        forward={
            "log1p_square noncausal, log1p_square window": Config(128, 64, 8, 2, ahead=True),
            "": Config(128, 128, 8, 2, ahead=True),
        },
        backward_queries={
            "cumulative noncausal, cumulative window": Config(128, 64, 8, 2, ahead=True),
            "log1p_square, cumulative gain plan": Config(128, 64, 8, 2, ahead=True),
            "linear float16, cumulative gain float16": Config(128, 64, 8, 2),
            "": Config(128, 128, 8, 2, ahead=True),
        },
        backward_keys={
            "log1p_square": Config(32, 64, 4, 2, ahead=True),
            "cumulative far, cumulative plan noncausal": Config(32, 128, 8, 2, ahead=True),
            "": Config(64, 128, 8, 2, ahead=True),
        },
        backward_table={"": Config(64, 64, 4, 2)},
    ),
    128: Row(
        forward={
            "cumulative window, cumulative plan noncausal": Config(128, 64, 8, 2, ahead=True),
            "cumulative gain plan float16": Config(128, 64, 8, 2),
            "linear plan, cumulative plan": Config(128, 128, 8, 2),
            "log1p_square noncausal, log1p_square window": Config(128, 32, 8, 2),
            "log1p_square, distance plan": Config(128, 64, 8, 2, ahead=True),
            "": Config(128, 128, 8, 2, ahead=True),
        },
        backward_queries={
            "cumulative gain plan float16, cumulative gain window float16": Config(128, 32, 8, 2),
            "cumulative plan": Config(128, 64, 8, 2),
            "log1p_square": Config(128, 32, 8, 2, ahead=True),
            "": Config(128, 64, 8, 2, ahead=True),
        },
        backward_keys={
            "cumulative far, cumulative plan noncausal": Config(16, 128, 8, 2),
            "cumulative float16 noncausal, cumulative float16 window": Config(16, 128, 8, 2),
            "cumulative plan, cumulative gain float16": Config(32, 128, 8, 2),
            "log1p_square": Config(16, 128, 8, 1, ahead=True),
            "": Config(32, 128, 8, 2, ahead=True),
        },
        backward_table={"plan": Config(64, 64, 8), "": Config(64, 64)},
    ),
    256: _WIDEST,
}
BLACKWELL = {
    64: Row(
        forward={
            "log1p_square plan": Config(64, 64, 4, 2),
            "noncausal, window": Config(128, 64, 8, 2),
            "log1p_square, distance plan, cumulative plan": Config(128, 64, 8),
            "": Config(128, 128, 8, 2),
        },
        backward_queries={
            "log1p_square noncausal, log1p_square window": Config(64, 32),
            "noncausal, window": Config(64, 64),
            "log1p_square, distance plan, cumulative plan": Config(64, 64, 8),
            "": Config(128, 32, 8, 2),
        },
        backward_keys={
            "noncausal, window, cumulative gain float16": Config(32, 64, 8, 2),
            "": Config(32, 128, 8, 2),
        },
        backward_table={"": Config(64, 64, 4, 2)},
    ),
    128: Row(
        forward={
            "log1p_square plan": Config(128, 32, 8),
            "noncausal, window": Config(128, 32, 8, 2),
            "": Config(128, 64, 8, 2),
        },
        backward_queries={
            "noncausal, window": Config(64, 32, 4, 2),
            "log1p_square": Config(128, 32, 8, 2),
            "": Config(128, 64, 8, 2),
        },
        backward_keys={"": Config(16, 64)},
        backward_table={"plan": Config(64, 64, 8), "": Config(64, 64)},
    ),
    256: _WIDEST,
}
# Sequences that are ranges of rows have lengths and addresses of their own, which take registers.
OF_SEQUENCES = {
    64: Row(
        forward={"cumulative gain noncausal": Config(128, 32, 8, 2), "": Config(128, 64, 8, 2)},
        backward_queries={
            "log1p_square noncausal": Config(128, 32, 8, 2),
            "": Config(128, 64, 8, 2),
        },
        backward_keys={"": Config(32, 128, 8)},
        backward_table={"plan": Config(64, 64), "": Config(64, 64, 8, 2)},
    ),
    128: Row(
        forward={"log1p_square noncausal": Config(128, 32, 8, 2), "": Config(64, 64, 4, 2)},
        backward_queries={"log1p_square, plan": Config(128, 16, 8), "": Config(128, 32, 8)},
        backward_keys={"": Config(16, 64, 8)},
        backward_table={"": Config(64, 64, 8)},
    ),
    256: replace(
        _WIDEST,
        forward={"": Config(64, 16, 8)},
        backward_keys={"distance plan": Config(32, 16, 8), "": Config(16, 32, 8)},
    ),
}
OF_SEQUENCES_ON_AMPERE = OF_SEQUENCES | {
    128: replace(
        OF_SEQUENCES[128],
        forward={
            "log1p_square, cumulative noncausal, cumulative window": Config(64, 32, 4, 2),
            "cumulative plan": Config(64, 32, 4, 2),
            "": Config(64, 64, 4, 2),
        },
        backward_queries={"": Config(128, 16, 8)},
        backward_table={"": Config(32, 32)},
    )
}
OF_SEQUENCES_ON_BLACKWELL = OF_SEQUENCES | {
    64: Row(
        forward={"": Config(64, 64, 4, 2)},
        backward_queries={
            "noncausal, window, plan": Config(64, 32, 4, 2),
            "log1p_square, cumulative gain": Config(64, 64),
            "": Config(128, 32, 8, 2),
        },
        backward_keys={
            "plan, log1p_square noncausal": Config(32, 64, 8, 2),
            "": Config(32, 64),
        },
        backward_table={"plan": Config(64, 64), "": Config(64, 64, 8, 2)},
    ),
    128: Row(
        forward={"noncausal, window": Config(64, 32, 4, 2), "": Config(128, 32, 8, 2)},
        backward_queries={
            "noncausal, window, plan": Config(64, 32, 4, 2),
            "log1p_square": Config(128, 16, 8),
            "": Config(64, 32),
        },
        backward_keys={"": Config(16, 64)},
        backward_table={"": Config(64, 64, 8)},
    ),
}
GEFORCE_AMPERE = AMPERE | {
    64: replace(AMPERE[64], backward_keys={"": Config(32, 128, 8, 2)}),
    128: replace(
        AMPERE[128],
        forward={"log1p_square noncausal": Config(64, 32, 4, 2), **AMPERE[128].forward},
    ),
}
# mma.sync as on Ampere, but other passes of the compiler: some kernels take more registers.
GEFORCE_BLACKWELL = AMPERE | {
    64: replace(
        AMPERE[64],
        forward={
            "cumulative gain noncausal": Config(128, 32, 8, 2),
            "log1p_square, noncausal, window, plan": Config(128, 64, 8, 2),
            "": Config(128, 128, 8, 2),
        },
        backward_queries={"noncausal, window": Config(128, 32, 8, 2), "": Config(128, 64, 8, 2)},
        backward_keys={"": Config(32, 128, 8, 2)},
    ),
    128: replace(
        AMPERE[128],
        forward={
            "noncausal, window": Config(64, 32, 4, 2),
            "log1p_square": Config(128, 32, 8, 2),
            "": Config(64, 64, 4, 2),
        },
        backward_queries={
            "log1p_square, noncausal, window": Config(128, 16, 8),
            "": Config(128, 32, 8, 2, ahead=True),
        },
        backward_keys={
            "cumulative gain trained": Config(16, 64, 8),
            "cumulative trained": Config(16, 64, 8, ahead=True),
            **AMPERE[128].backward_keys,
        },
    ),
}
OF_SEQUENCES_ON_GEFORCE_BLACKWELL = OF_SEQUENCES_ON_AMPERE | {
    128: replace(OF_SEQUENCES_ON_AMPERE[128], forward={"": Config(64, 32, 4, 2)})
}
SINGLE = {
    64: Row(
        forward={"": Config(32, 32)},
        backward_queries={"window": Config(16, 32), "": Config(32, 32)},
        backward_keys={"log1p_square": Config(16, 32), "": Config(32, 32)},
        backward_table={"": Config(32, 32)},
    ),
    128: Row(
        forward={
            "log1p_square, distance plan, cumulative gain": Config(16, 16, 8),
            "": Config(16, 32, 8),
        },
        backward_queries={"": Config(16, 32, 8)},
        backward_keys={"log1p_square, cumulative gain": Config(16, 16, 8), "": Config(16, 32, 8)},
        backward_table={"": Config(32, 32, 8)},
    ),
    256: Row(
        forward={
            "log1p_square, distance plan, cumulative gain": Config(16, 16, 8),
            "": Config(16, 32, 8),
        },
        backward_queries={"": Config(16, 16)},
        backward_keys={"": Config(16, 16, 8)},
        backward_table={"": Config(16, 16)},
    ),
}
SINGLE_ON_GEFORCE_BLACKWELL = SINGLE | {
    128: replace(
        SINGLE[128],
        backward_keys={"log1p_square": Config(16, 16), **SINGLE[128].backward_keys},
    )
}


@dataclass(frozen=True)
class Kind:
    """What of a problem decides how many registers it takes."""

    form: str
    with_gain: bool = False
    planned: bool = False
    trained: bool = False  # whether gradients of sums are computed
    causal: bool = True
    windowed: bool = False
    far: bool = False  # whether offsets in a head take 64 bits
    dtype: torch.dtype = torch.bfloat16

    @property
    def words(self) -> set[str]:
        """Its form, and what else it has of what Choices name."""
        said = {
            "gain": self.with_gain,
            "plan": self.planned,
            "trained": self.trained,
            "noncausal": not self.causal,
            "window": self.windowed,
            "far": self.far,
            "float16": self.dtype == torch.float16,
        }
        return {self.form, *(word for word, holds in said.items() if holds)}


# Of half precision, of half precision with sequences, and of single precision.
_BY_FAMILY = {
    Family.AMPERE: (AMPERE, OF_SEQUENCES_ON_AMPERE, SINGLE),
    Family.GEFORCE_AMPERE: (GEFORCE_AMPERE, OF_SEQUENCES_ON_AMPERE, SINGLE),
    Family.HOPPER: (HOPPER, OF_SEQUENCES, SINGLE),
    Family.BLACKWELL: (BLACKWELL, OF_SEQUENCES_ON_BLACKWELL, SINGLE),
    Family.GEFORCE_BLACKWELL: (
        GEFORCE_BLACKWELL,
        OF_SEQUENCES_ON_GEFORCE_BLACKWELL,
        SINGLE_ON_GEFORCE_BLACKWELL,
    ),
}


@cache
def choose(
    kernel: str, processor: Processor, width: int, kind: Kind, with_sequences: bool = False
) -> Config:
    """For the field `kernel` of a row, width being the larger of q's and v's padded head_dim."""
    half, half_of_sequences, single = _BY_FAMILY[processor.family]
    table = half_of_sequences if with_sequences else half
    if kind.dtype == torch.float32:
        table = single
    row = table[min(widest for widest in table if width <= widest)]
    words = kind.words
    return next(
        config
        for problems, config in getattr(row, kernel).items()
        if any(words.issuperset(problem.split()) for problem in problems.split(","))
    )


def sum_columns(processor: Processor) -> int:
    """Of a bias's factors, the columns that sums of gradients take: as few as matrix units allow.

    Those of Blackwell's data center GPUs multiply 128 rows by at least 16 columns.
    """
    return 16 if processor.family is Family.BLACKWELL else 8
