"""Blackwell in GeForce cards: mma.sync as on Ampere, but some kernels use more registers."""

from __future__ import annotations

from dataclasses import replace

from .ampere import AMPERE, SEQUENCES_ON_AMPERE
from .common import SINGLE
from .rules import Config, Rule

GEFORCE_BLACKWELL = AMPERE | {
    64: replace(
        AMPERE[64],
        forward=[
            Rule(Config(128, 32, 8, 2), "cumulative", gain=True, causal=False),
            Rule(Config(128, 64, 8, 2), "log1p_square"),
            Rule(Config(128, 64, 8, 2), causal=False),
            Rule(Config(128, 64, 8, 2), window=True),
            Rule(Config(128, 64, 8, 2), plan=True),
            Rule(Config(128, 128, 8, 2)),
        ],
        backward_queries=[
            Rule(Config(128, 32, 8, 2), causal=False),
            Rule(Config(128, 32, 8, 2), window=True),
            Rule(Config(128, 64, 8, 2)),
        ],
        backward_keys=[
            Rule(Config(32, 128, 8, 2)),
        ],
    ),
    128: replace(
        AMPERE[128],
        forward=[
            Rule(Config(64, 32, 4, 2), causal=False),
            Rule(Config(64, 32, 4, 2), window=True),
            Rule(Config(128, 32, 8, 2), "log1p_square"),
            Rule(Config(64, 64, 4, 2)),
        ],
        backward_queries=[
            Rule(Config(128, 16, 8), "log1p_square"),
            Rule(Config(128, 16, 8), causal=False),
            Rule(Config(128, 16, 8), window=True),
            Rule(Config(128, 32, 8, 2, ahead=True)),
        ],
        backward_keys=[
            Rule(Config(16, 64, 8), "cumulative", gain=True, bias_gradient=True),
            Rule(Config(16, 64, 8, ahead=True), "cumulative", bias_gradient=True),
            Rule(Config(16, 64, 8), "log1p_square"),
            Rule(Config(16, 64, 8), plan=True),
            Rule(Config(16, 64, 8), bias_gradient=True),
            Rule(Config(32, 64, 8, 2)),
        ],
    ),
}
SEQUENCES_ON_GEFORCE_BLACKWELL = SEQUENCES_ON_AMPERE | {
    128: replace(SEQUENCES_ON_AMPERE[128], forward=[Rule(Config(64, 32, 4, 2))])
}
SINGLE_ON_GEFORCE_BLACKWELL = SINGLE | {
    128: replace(
        SINGLE[128],
        backward_keys=[
            Rule(Config(16, 16), "log1p_square"),
            Rule(Config(16, 16, 8), "cumulative", gain=True),
            Rule(Config(16, 32, 8)),
        ],
    )
}
