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
from .ampere import (
    AMPERE,
    GEFORCE_AMPERE,
    PACKED_ON_AMPERE,
    PACKED_ON_GEFORCE_AMPERE,
)
from .blackwell import BLACKWELL, PACKED_ON_BLACKWELL
from .common import FLOAT32, PACKED
from .dense import DENSE_ON_AMPERE, DENSE_ON_BLACKWELL, DENSE_ON_GEFORCE, DENSE_ON_HOPPER
from .geforce_blackwell import (
    FLOAT32_ON_GEFORCE_BLACKWELL,
    GEFORCE_BLACKWELL,
    PACKED_ON_GEFORCE_BLACKWELL,
)
from .hopper import HOPPER
from .normalized import (
    NORMALIZED_ON_AMPERE,
    NORMALIZED_ON_BLACKWELL,
    NORMALIZED_ON_GEFORCE,
    NORMALIZED_ON_HOPPER,
)
from .relative import RELATIVE, RELATIVE_FLOAT32, RELATIVE_ON_HOPPER
from .rules import LARGEST_TILE as LARGEST_TILE
from .rules import Config, Features, Row


class Tables(NamedTuple):
    """Rows by the largest head_dim that they apply to."""

    half: Mapping[int, Row]
    half_packed: Mapping[int, Row]
    float32: Mapping[int, Row]
    # Half precision, of the forms that have tables of their own.
    half_of_forms: Mapping[str, Mapping[int, Row]]
    half_relative: Mapping[int, Row] = RELATIVE


OF_FORMS_ON_AMPERE = {"dense": DENSE_ON_AMPERE, "normalized": NORMALIZED_ON_AMPERE}
OF_FORMS_ON_HOPPER = {"dense": DENSE_ON_HOPPER, "normalized": NORMALIZED_ON_HOPPER}
OF_FORMS_ON_GEFORCE = {"dense": DENSE_ON_GEFORCE, "normalized": NORMALIZED_ON_GEFORCE}
OF_FORMS_ON_BLACKWELL = {"dense": DENSE_ON_BLACKWELL, "normalized": NORMALIZED_ON_BLACKWELL}
TABLES = {
    Family.AMPERE: Tables(AMPERE, PACKED_ON_AMPERE, FLOAT32, OF_FORMS_ON_AMPERE),
    Family.GEFORCE_AMPERE: Tables(
        GEFORCE_AMPERE, PACKED_ON_GEFORCE_AMPERE, FLOAT32, OF_FORMS_ON_GEFORCE
    ),
    Family.HOPPER: Tables(HOPPER, PACKED, FLOAT32, OF_FORMS_ON_HOPPER, RELATIVE_ON_HOPPER),
    Family.BLACKWELL: Tables(BLACKWELL, PACKED_ON_BLACKWELL, FLOAT32, OF_FORMS_ON_BLACKWELL),
    Family.GEFORCE_BLACKWELL: Tables(
        GEFORCE_BLACKWELL,
        PACKED_ON_GEFORCE_BLACKWELL,
        FLOAT32_ON_GEFORCE_BLACKWELL,
        OF_FORMS_ON_GEFORCE,
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
    table = tables.half_packed if with_sequences else tables.half
    single = features.dtype == torch.float32
    if ranks:
        table = RELATIVE_FLOAT32 if single else tables.half_relative
    elif single:
        table = tables.float32
    elif features.form in tables.half_of_forms:
        table = tables.half_of_forms[features.form]
    row = table[min(widest for widest in table if width + ranks <= widest)]
    return next(rule.config for rule in getattr(row, kernel) if rule.matches(features))


def sum_columns(processor: Processor) -> int:
    """Returns the number of columns of factors that gradients of sums use: the minimum of the
    matrix units, which is 16 on data center Blackwell and 8 elsewhere."""
    return 16 if processor.family is Family.BLACKWELL else 8
