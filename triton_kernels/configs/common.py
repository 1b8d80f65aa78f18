"""Configurations shared by several families of processors."""

from __future__ import annotations

from dataclasses import replace

from .rules import Config, Row, Rule

# For heads of up to 256 channels.
WIDEST = Row(
    forward=[
        Rule(Config(64, 32, 8)),
    ],
    backward_queries=[
        Rule(Config(32, 32), "linear", causal=False),
        Rule(Config(32, 32, 8)),
    ],
    backward_keys=[
        Rule(Config(16, 32, 8), "log1p_square"),
        Rule(Config(16, 32, 8), "linear", plan=True),
        Rule(Config(16, 32, 8), "distance", plan=True),
        Rule(Config(16, 32, 8), "cumulative", plan=True),
        Rule(Config(16, 32, 8), bias_gradient=True),
        Rule(Config(32, 32, 8)),
    ],
    backward_table=[
        Rule(Config(16, 16)),
    ],
)

# Kernels with sequences keep the lengths and addresses of a sequence in additional registers.
PACKED = {
    64: Row(
        forward=[
            Rule(Config(128, 32, 8, 2), "cumulative", gain=True, causal=False),
            Rule(Config(128, 64, 8, 2)),
        ],
        backward_queries=[
            Rule(Config(128, 32, 8, 2), "log1p_square", causal=False),
            Rule(Config(128, 64, 8, 2)),
        ],
        backward_keys=[
            Rule(Config(32, 128, 8)),
        ],
        backward_table=[
            Rule(Config(64, 64), plan=True),
            Rule(Config(64, 64, 8, 2)),
        ],
    ),
    128: Row(
        forward=[
            Rule(Config(128, 32, 8, 2), "log1p_square", causal=False),
            Rule(Config(64, 64, 4, 2)),
        ],
        backward_queries=[
            Rule(Config(128, 16, 8), "log1p_square"),
            Rule(Config(128, 16, 8), plan=True),
            Rule(Config(128, 32, 8)),
        ],
        backward_keys=[
            Rule(Config(16, 64, 8)),
        ],
        backward_table=[
            Rule(Config(64, 64, 8)),
        ],
    ),
    256: replace(
        WIDEST,
        forward=[
            Rule(Config(64, 16, 8)),
        ],
        backward_keys=[
            Rule(Config(32, 16, 8), "distance", plan=True),
            Rule(Config(16, 32, 8)),
        ],
    ),
}

# float32, for which no matrix unit is exact.
FLOAT32 = {
    64: Row(
        forward=[
            Rule(Config(32, 64, 8), "normalized"),
            Rule(Config(32, 32)),
        ],
        backward_queries=[
            Rule(Config(16, 32), window=True),
            Rule(Config(16, 32), "normalized"),
            Rule(Config(32, 32)),
        ],
        backward_keys=[
            Rule(Config(16, 32), "log1p_square"),
            Rule(Config(32, 32)),
        ],
        backward_table=[
            Rule(Config(32, 32)),
        ],
    ),
    128: Row(
        forward=[
            Rule(Config(16, 16, 8), "log1p_square"),
            Rule(Config(16, 16, 8), "distance", plan=True),
            Rule(Config(16, 16, 8), "cumulative", gain=True),
            Rule(Config(16, 32, 8)),
        ],
        backward_queries=[
            Rule(Config(16, 32, 8)),
        ],
        backward_keys=[
            Rule(Config(16, 16, 8), "log1p_square"),
            Rule(Config(16, 16, 8), "cumulative", gain=True),
            Rule(Config(16, 32, 8)),
        ],
        backward_table=[
            Rule(Config(16, 16), "normalized"),
            Rule(Config(32, 32, 8)),
        ],
    ),
    256: Row(
        forward=[
            Rule(Config(16, 16, 8), "log1p_square"),
            Rule(Config(16, 16, 8), "distance", plan=True),
            Rule(Config(16, 16, 8), "cumulative", gain=True),
            Rule(Config(16, 32, 8)),
        ],
        backward_queries=[
            Rule(Config(16, 16)),
        ],
        backward_keys=[
            Rule(Config(16, 16, 8)),
        ],
        backward_table=[
            Rule(Config(16, 16)),
        ],
    ),
}
