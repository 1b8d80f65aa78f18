"""Block sizes by processor, head width, kernel and features of the problem. Nothing is autotuned.

Those for half precision and heads of up to 128 were chosen by search:
bench/machine_code/configurations.py compiles candidates and estimates their time, and further
candidates were compared by hand. The others are the largest tested ones that do not spill
registers. None has been timed on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

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
from .normalized import NORMALIZED, NORMALIZED_ON_BLACKWELL, NORMALIZED_ON_WARPS
from .relative import RELATIVE, SINGLE_RELATIVE
from .rules import LARGEST_TILE as LARGEST_TILE
from .rules import Config, Features, Row


class Tables(NamedTuple):
    """Rows by the largest head_dim that they apply to."""

    half: Mapping[int, Row]
    half_of_sequences: Mapping[int, Row]
    single: Mapping[int, Row]
    # Half precision, of the forms that have tables of their own.
    half_of_forms: Mapping[str, Mapping[int, Row]]


OF_FORMS = {"dense": DENSE, "normalized": NORMALIZED}
OF_FORMS_ON_WARPS = {"dense": DENSE, "normalized": NORMALIZED_ON_WARPS}
OF_FORMS_ON_BLACKWELL = {"dense": DENSE_ON_BLACKWELL, "normalized": NORMALIZED_ON_BLACKWELL}
TABLES = {
    Family.AMPERE: Tables(AMPERE, SEQUENCES_ON_AMPERE, SINGLE, OF_FORMS_ON_WARPS),
    Family.GEFORCE_AMPERE: Tables(GEFORCE_AMPERE, SEQUENCES_ON_AMPERE, SINGLE, OF_FORMS_ON_WARPS),
    Family.HOPPER: Tables(HOPPER, SEQUENCES, SINGLE, OF_FORMS),
    Family.BLACKWELL: Tables(BLACKWELL, SEQUENCES_ON_BLACKWELL, SINGLE, OF_FORMS_ON_BLACKWELL),
    Family.GEFORCE_BLACKWELL: Tables(
        GEFORCE_BLACKWELL,
        SEQUENCES_ON_GEFORCE_BLACKWELL,
        SINGLE_ON_GEFORCE_BLACKWELL,
        OF_FORMS_ON_WARPS,
    ),
}


@cache
def choose(
    kernel: str,
    processor: Processor,
    width: int,
    features: Features,
    with_sequences: bool = False,
    ranks: int = 0,
) -> Config:
    """Returns the configuration of a kernel, a field of Row. width is the larger of the padded
    head_dims of q and v. ranks: the sum of the padded ranks of a relative bias, or 0."""
    tables = TABLES[processor.family]
    table = tables.half_of_sequences if with_sequences else tables.half
    single = features.dtype == torch.float32
    if ranks:
        table = SINGLE_RELATIVE if single else RELATIVE
    elif single:
        table = tables.single
    elif features.form in tables.half_of_forms:
        table = tables.half_of_forms[features.form]
    row = table[min(widest for widest in table if width + ranks <= widest)]
    return next(rule.config for rule in getattr(row, kernel) if rule.matches(features))


def sum_columns(processor: Processor) -> int:
    """Returns the number of columns of factors that gradients of sums use: the minimum of the
    matrix units, which is 16 on data center Blackwell and 8 elsewhere."""
    return 16 if processor.family is Family.BLACKWELL else 8
