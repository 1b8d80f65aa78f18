"""Ampere, in data centers and GeForce cards, and Ada: mma.sync with asynchronous copies."""

from __future__ import annotations

from dataclasses import replace

import torch

from .common import SEQUENCES, WIDEST
from .rules import Config, Row, Rule

AMPERE = {
    64: Row(
        forward=[
            Rule(Config(128, 32, 8, 2), "cumulative", gain=True, causal=False),
            Rule(Config(128, 64, 8, 2), "log1p_square"),
            Rule(Config(128, 64, 8, 2), "distance", plan=True),
            Rule(Config(128, 64, 8, 2), "cumulative", plan=True),
            Rule(Config(128, 128, 8, 2)),
        ],
        backward_queries=[
            Rule(Config(128, 32, 8, 2), "log1p_square", causal=False),
            Rule(Config(128, 32, 8, 2), "log1p_square", window=True),
            Rule(Config(128, 64, 8, 2)),
        ],
        backward_keys=[
            Rule(Config(32, 128, 8, 2), "cumulative", dtype=torch.float16),
            Rule(Config(32, 128, 8, 2), "cumulative", window=True),
            Rule(Config(32, 128, 8, 2), "cumulative", plan=True),
            Rule(Config(32, 128, 8, 2), "log1p_square"),
            Rule(Config(32, 128, 8, 2), "cumulative", gain=True),
            Rule(Config(64, 64, 8, 2)),
        ],
        backward_table=[
            Rule(Config(32, 32), plan=True),
            Rule(Config(64, 64, 8, 2)),
        ],
    ),
    128: Row(
        forward=[
            Rule(Config(64, 32, 4, 2), causal=False, window=True),
            Rule(Config(64, 32, 4, 2), causal=False, plan=True),
            Rule(Config(64, 64, 4, 2)),
        ],
        backward_queries=[
            Rule(Config(128, 32, 8, 2)),
        ],
        backward_keys=[
            Rule(Config(16, 64, 8), "log1p_square"),
            Rule(Config(16, 64, 8), plan=True),
            Rule(Config(16, 64, 8), bias_gradient=True),
            Rule(Config(32, 64, 8, 2)),
        ],
        backward_table=[
            Rule(Config(32, 32)),
        ],
    ),
    256: replace(
        WIDEST,
        forward=[
            Rule(Config(64, 64, 8), "log1p_square"),
            Rule(Config(64, 32, 8)),
        ],
    ),
}
# GeForce cards, and Ada, for which the compiler generates different code.
GEFORCE_AMPERE = AMPERE | {
    64: replace(
        AMPERE[64],
        backward_keys=[
            Rule(Config(32, 128, 8, 2)),
        ],
    ),
    128: replace(
        AMPERE[128],
        forward=[Rule(Config(64, 32, 4, 2), "log1p_square", causal=False), *AMPERE[128].forward],
    ),
}
SEQUENCES_ON_AMPERE = SEQUENCES | {
    128: replace(
        SEQUENCES[128],
        forward=[
            Rule(Config(64, 32, 4, 2), "log1p_square"),
            Rule(Config(64, 32, 4, 2), "cumulative", causal=False),
            Rule(Config(64, 32, 4, 2), "cumulative", window=True),
            Rule(Config(64, 32, 4, 2), "cumulative", plan=True),
            Rule(Config(64, 64, 4, 2)),
        ],
        backward_queries=[
            Rule(Config(128, 16, 8)),
        ],
        backward_table=[
            Rule(Config(32, 32)),
        ],
    ),
}
