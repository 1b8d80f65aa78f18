"""Block sizes by processor, head width, kernel and features of the problem. Nothing is autotuned.

Those for half precision and heads of up to 128 were chosen by search:
bench/machine_code/configurations.py compiles candidates and estimates their time, and further
candidates were compared by hand. The others are the largest tested ones that do not spill
registers. None has been timed on a GPU.
"""

from __future__ import annotations

from functools import cache

import torch

from ..processors import Family, Processor
from .ampere import AMPERE, GEFORCE_AMPERE, SEQUENCES_ON_AMPERE
from .blackwell import BLACKWELL, SEQUENCES_ON_BLACKWELL
from .common import SEQUENCES, SINGLE
from .dense import DENSE, DENSE_ON_BLACKWELL
from .geforce_blackwell import (
    GEFORCE_BLACKWELL,
    SEQUENCES_ON_GEFORCE_BLACKWELL,
    SINGLE_ON_GEFORCE_BLACKWELL,
)
from .hopper import HOPPER
from .rules import LARGEST_TILE as LARGEST_TILE
from .rules import Config, Features

# For half precision, half precision with sequences, single precision, and dense biases in half
# precision: rows by the largest head_dim that they apply to.
TABLES = {
    Family.AMPERE: (AMPERE, SEQUENCES_ON_AMPERE, SINGLE, DENSE),
    Family.GEFORCE_AMPERE: (GEFORCE_AMPERE, SEQUENCES_ON_AMPERE, SINGLE, DENSE),
    Family.HOPPER: (HOPPER, SEQUENCES, SINGLE, DENSE),
    Family.BLACKWELL: (BLACKWELL, SEQUENCES_ON_BLACKWELL, SINGLE, DENSE_ON_BLACKWELL),
    Family.GEFORCE_BLACKWELL: (
        GEFORCE_BLACKWELL,
        SEQUENCES_ON_GEFORCE_BLACKWELL,
        SINGLE_ON_GEFORCE_BLACKWELL,
        DENSE,
    ),
}


@cache
def choose(
    kernel: str, processor: Processor, width: int, features: Features, with_sequences: bool = False
) -> Config:
    """Returns the configuration of a kernel, a field of Row. width is the larger of the padded
    head_dims of q and v."""
    half, half_of_sequences, single, dense = TABLES[processor.family]
    table = half_of_sequences if with_sequences else half
    if features.dtype == torch.float32:
        table = single
    elif features.form == "dense":
        table = dense
    row = table[min(widest for widest in table if width <= widest)]
    return next(rule.config for rule in getattr(row, kernel) if rule.matches(features))


def sum_columns(processor: Processor) -> int:
    """Returns the number of columns of factors that gradients of sums use: the minimum of the
    matrix units, which is 16 on data center Blackwell and 8 elsewhere."""
    return 16 if processor.family is Family.BLACKWELL else 8
