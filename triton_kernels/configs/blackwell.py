"""Blackwell in data centers: tcgen05 and tensor memory."""

from __future__ import annotations

import torch

from .common import PACKED, WIDEST
from .rules import Config, Row, Rule

BLACKWELL = {
    64: Row(
        forward=[
            Rule(Config(64, 64, 4, 2), "log1p_square", plan=True),
            Rule(Config(128, 64, 8, 2), causal=False),
            Rule(Config(128, 64, 8, 2), window=True),
            Rule(Config(128, 64, 8), "log1p_square"),
            Rule(Config(128, 64, 8), "distance", plan=True),
            Rule(Config(128, 64, 8), "cumulative", plan=True),
            Rule(Config(128, 128, 8, 2)),
        ],
        backward_queries=[
            Rule(Config(64, 32), "log1p_square", causal=False),
            Rule(Config(64, 32), "log1p_square", window=True),
            Rule(Config(64, 64), causal=False),
            Rule(Config(64, 64), window=True),
            Rule(Config(64, 64, 8), "log1p_square"),
            Rule(Config(64, 64, 8), "distance", plan=True),
            Rule(Config(64, 64, 8), "cumulative", plan=True),
            Rule(Config(128, 32, 8, 2)),
        ],
        backward_keys=[
            Rule(Config(32, 64, 8, 2), causal=False),
            Rule(Config(32, 64, 8, 2), window=True),
            Rule(Config(32, 64, 8, 2), "cumulative", gain=True, dtype=torch.float16),
            Rule(Config(32, 128, 8, 2)),
        ],
        backward_table=[
            Rule(Config(64, 64, 4, 2)),
        ],
    ),
    128: Row(
        forward=[
            Rule(Config(128, 32, 8), "log1p_square", plan=True),
            Rule(Config(128, 32, 8, 2), causal=False),
            Rule(Config(128, 32, 8, 2), window=True),
            Rule(Config(128, 64, 8, 2)),
        ],
        backward_queries=[
            Rule(Config(64, 32, 4, 2), causal=False),
            Rule(Config(64, 32, 4, 2), window=True),
            Rule(Config(128, 32, 8, 2), "log1p_square"),
            Rule(Config(128, 64, 8, 2)),
        ],
        backward_keys=[
            Rule(Config(16, 64)),
        ],
        backward_table=[
            Rule(Config(64, 64, 8), plan=True),
            Rule(Config(64, 64)),
        ],
    ),
    256: WIDEST,
}
PACKED_ON_BLACKWELL = PACKED | {
    64: Row(
        forward=[
            Rule(Config(64, 64, 4, 2)),
        ],
        backward_queries=[
            Rule(Config(64, 32, 4, 2), causal=False),
            Rule(Config(64, 32, 4, 2), window=True),
            Rule(Config(64, 32, 4, 2), plan=True),
            Rule(Config(64, 64), "log1p_square"),
            Rule(Config(64, 64), "cumulative", gain=True),
            Rule(Config(128, 32, 8, 2)),
        ],
        backward_keys=[
            Rule(Config(32, 64, 8, 2), plan=True),
            Rule(Config(32, 64, 8, 2), "log1p_square", causal=False),
            Rule(Config(32, 64)),
        ],
        backward_table=[
            Rule(Config(64, 64), plan=True),
            Rule(Config(64, 64, 8, 2)),
        ],
    ),
    128: Row(
        forward=[
            Rule(Config(64, 32, 4, 2), causal=False),
            Rule(Config(64, 32, 4, 2), window=True),
            Rule(Config(128, 32, 8, 2)),
        ],
        backward_queries=[
            Rule(Config(64, 32, 4, 2), causal=False),
            Rule(Config(64, 32, 4, 2), window=True),
            Rule(Config(64, 32, 4, 2), plan=True),
            Rule(Config(128, 16, 8), "log1p_square"),
            Rule(Config(64, 32)),
        ],
        backward_keys=[
            Rule(Config(16, 64)),
        ],
        backward_table=[
            Rule(Config(64, 64, 8)),
        ],
    ),
}
