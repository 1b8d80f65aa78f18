"""Sizes of blocks, by processor, head width, direction and problem. Nothing is tuned at call time.

Those of half precision for heads up to 128 were chosen by bench/machine_code/configurations.py,
which compiles and estimates, and by trials beside it; the others are the largest tried that spill
no registers. None was timed.
"""

from __future__ import annotations

from functools import cache

import torch

from ..processors import Family, Processor
from .ampere import AMPERE, GEFORCE_AMPERE, SEQUENCES_ON_AMPERE
from .blackwell import BLACKWELL, SEQUENCES_ON_BLACKWELL
from .common import SEQUENCES, SINGLE
from .dense import DENSE
from .geforce_blackwell import (
    GEFORCE_BLACKWELL,
    SEQUENCES_ON_GEFORCE_BLACKWELL,
    SINGLE_ON_GEFORCE_BLACKWELL,
)
from .hopper import HOPPER
from .rules import LARGEST_TILE as LARGEST_TILE
from .rules import Config, Features

# Of half precision, of half precision with sequences, and of single precision: rows by the widest
# head that they serve.
TABLES = {
    Family.AMPERE: (AMPERE, SEQUENCES_ON_AMPERE, SINGLE),
    Family.GEFORCE_AMPERE: (GEFORCE_AMPERE, SEQUENCES_ON_AMPERE, SINGLE),
    Family.HOPPER: (HOPPER, SEQUENCES, SINGLE),
    Family.BLACKWELL: (BLACKWELL, SEQUENCES_ON_BLACKWELL, SINGLE),
    Family.GEFORCE_BLACKWELL: (
        GEFORCE_BLACKWELL,
        SEQUENCES_ON_GEFORCE_BLACKWELL,
        SINGLE_ON_GEFORCE_BLACKWELL,
    ),
}


@cache
def choose(
    kernel: str, processor: Processor, width: int, features: Features, with_sequences: bool = False
) -> Config:
    """For the field `kernel` of a row, width being the larger of q's and v's padded head_dim."""
    half, half_of_sequences, single = TABLES[processor.family]
    table = half_of_sequences if with_sequences else half
    if features.dtype == torch.float32:
        table = single
    elif features.form == "dense":
        table = DENSE
    row = table[min(widest for widest in table if width <= widest)]
    return next(rule.config for rule in getattr(row, kernel) if rule.matches(features))


def sum_columns(processor: Processor) -> int:
    """Of a bias's factors, the columns that sums of gradients take: as few as matrix units allow.

    Those of Blackwell's data center GPUs multiply 128 rows by at least 16 columns.
    """
    return 16 if processor.family is Family.BLACKWELL else 8
