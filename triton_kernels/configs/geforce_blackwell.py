"""Blackwell in GeForce cards: mma.sync as on Ampere, but some kernels use more registers."""

from __future__ import annotations

from dataclasses import replace

import torch

from .ampere import GEFORCE_AMPERE, PACKED_ON_GEFORCE_AMPERE
from .common import FLOAT32
from .rules import Config, Rule

GEFORCE_BLACKWELL = GEFORCE_AMPERE | {
    64: replace(
        GEFORCE_AMPERE[64],
        forward=[
            Rule(Config(128, 32, 8, 2), "cumulative", gain=True, causal=False),
            Rule(Config(128, 32, 8, 2), "log1p_square", causal=False),
            Rule(Config(128, 64, 8, 2), "log1p_square"),
            Rule(Config(128, 64, 8, 2), causal=False),
            Rule(Config(128, 64, 8, 2), window=True),
            Rule(Config(128, 64, 8, 2), plan=True),
            Rule(Config(128, 128, 8, 2)),
        ],
        backward_queries=[
            Rule(Config(128, 32, 8, 2), "log1p_square"),
            Rule(Config(128, 32, 8, 2), causal=False),
            Rule(Config(128, 32, 8, 2), window=True),
            Rule(Config(128, 64, 8, 2)),
        ],
        backward_keys=[
            Rule(Config(32, 128, 8), "log1p_square", window=True),
            Rule(Config(32, 128, 8, 2)),
        ],
    ),
    128: replace(
        GEFORCE_AMPERE[128],
        forward=[
            Rule(Config(64, 32, 4, 2), causal=False),
            Rule(Config(64, 32, 4, 2), window=True),
            Rule(Config(64, 32, 4, 2), "cumulative", plan=True),
            Rule(Config(128, 32, 8, 2), "log1p_square"),
            Rule(Config(64, 64, 4, 2)),
        ],
        backward_queries=[
            Rule(Config(128, 16, 8), "log1p_square"),
            Rule(Config(128, 16, 8), causal=False),
            Rule(Config(128, 16, 8), window=True),
            Rule(Config(128, 16, 8), plan=True),
            Rule(Config(128, 16, 8), "cumulative", wide_offsets=True),
            Rule(Config(128, 16, 8), "linear", dtype=torch.float16),
            Rule(Config(128, 16, 8), "cumulative", dtype=torch.float16),
            Rule(Config(128, 32, 8, 2, ahead=True)),
        ],
    ),
}
PACKED_ON_GEFORCE_BLACKWELL = PACKED_ON_GEFORCE_AMPERE | {
    64: replace(
        PACKED_ON_GEFORCE_AMPERE[64],
        backward_queries=[
            Rule(Config(128, 32, 8, 2), "log1p_square", causal=False),
            Rule(Config(128, 32, 8, 2), "linear", plan=True),
            Rule(Config(128, 32, 8, 2), "cumulative", gain=True),
            Rule(Config(128, 64, 8, 2)),
        ],
    ),
    128: replace(PACKED_ON_GEFORCE_AMPERE[128], forward=[Rule(Config(64, 32, 4, 2))]),
}
FLOAT32_ON_GEFORCE_BLACKWELL = FLOAT32 | {
    128: replace(
        FLOAT32[128],
        backward_keys=[
            Rule(Config(16, 16), "log1p_square"),
            Rule(Config(16, 16), "cumulative", gain=True),
            Rule(Config(16, 32, 8)),
        ],
        backward_table=[
            Rule(Config(32, 32, 8)),
        ],
    )
}
