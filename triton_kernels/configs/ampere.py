"""Ampere, in data centers and GeForce cards, and Ada: mma.sync with asynchronous copies."""

from __future__ import annotations

from dataclasses import replace

import torch

from .common import PACKED, WIDEST
from .rules import Config, Row, Rule

# GeForce cards, and Ada, which have 99 KiB of shared memory per block.
GEFORCE_AMPERE = {
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
            Rule(Config(128, 32, 8, 2), "distance", window=True),
            Rule(Config(128, 64, 8, 2)),
        ],
        backward_keys=[
            Rule(Config(32, 128, 8, 2)),
        ],
        backward_table=[
            Rule(Config(32, 32), plan=True),
            Rule(Config(64, 64, 8, 2)),
        ],
    ),
    128: Row(
        forward=[
            Rule(Config(64, 32, 4, 2), "log1p_square", causal=False),
            Rule(Config(64, 32, 4, 2), causal=False, window=True),
            Rule(Config(64, 32, 4, 2), causal=False, plan=True),
            Rule(Config(64, 64, 4, 2)),
        ],
        backward_queries=[
            Rule(Config(128, 16, 8), "linear", plan=True, dtype=torch.float16),
            Rule(Config(128, 16, 8), "linear", window=True),
            Rule(Config(128, 16, 8), "cumulative", gain=False, window=True),
            Rule(Config(128, 32, 8, 2)),
        ],
        backward_keys=[
            Rule(Config(16, 128, 8), "linear"),
            Rule(Config(16, 128, 8), "cumulative"),
            Rule(Config(16, 128, 8, 2)),
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
# Data center GPUs, which have 163 KiB. For causal attention without a window or plan, registers
# suffice for blocks of four warps, of which two run at once on a multiprocessor.
_PLAIN = {"plan": False, "causal": True, "window": False, "wide_offsets": False}
AMPERE = GEFORCE_AMPERE | {
    64: replace(
        GEFORCE_AMPERE[64],
        forward=[
            Rule(Config(128, 64, 4, 2), "none", **_PLAIN),
            Rule(Config(128, 64, 4, 2), "distance", **_PLAIN),
            Rule(Config(128, 64, 4, 3), "linear", **_PLAIN),
            Rule(Config(128, 64, 4, 3), "log1p_square", **_PLAIN),
            Rule(Config(128, 64, 8, 3), "cumulative", **_PLAIN),
            *GEFORCE_AMPERE[64].forward,
        ],
        backward_queries=[
            Rule(Config(128, 32, 8, 2), "log1p_square", causal=False),
            Rule(Config(128, 32, 8, 2), "log1p_square", window=True),
            Rule(Config(64, 32, 4, 3), "linear", **_PLAIN),
            Rule(Config(128, 64, 8, 3)),
        ],
        backward_keys=[
            Rule(Config(32, 128, 8, 2), "log1p_square"),
            Rule(Config(32, 128, 8, 2), "cumulative", gain=True),
            Rule(Config(32, 128, 8, 2), "cumulative", dtype=torch.float16),
            Rule(Config(64, 64, 4, 2), "distance", causal=False),
            Rule(Config(64, 64, 8, 2), "none", window=True),
            Rule(Config(64, 64, 4, 3)),
        ],
        backward_table=[
            Rule(Config(64, 64, 4, 3)),
        ],
    ),
    128: replace(
        GEFORCE_AMPERE[128],
        forward=[
            Rule(Config(64, 32, 4, 2), causal=False, window=True),
            Rule(Config(64, 32, 4, 2), causal=False, plan=True),
            Rule(Config(64, 64, 4, 2), "none", window=True),
            Rule(Config(64, 64, 4, 2), "cumulative", gain=True, causal=False),
            Rule(Config(64, 64, 4, 2), "log1p_square", causal=False),
            Rule(Config(64, 64, 4, 2), "log1p_square", window=True),
            Rule(Config(128, 64, 8, 3)),
        ],
        backward_queries=[
            Rule(Config(128, 32, 8, 3), "none", **_PLAIN),
            Rule(Config(64, 64, 4, 2), "distance", **_PLAIN),
            Rule(Config(64, 32, 4, 3), "linear", **_PLAIN),
            Rule(Config(64, 32, 4, 3), "cumulative", **_PLAIN),
            Rule(Config(128, 32, 8, 2)),
        ],
        backward_keys=[
            Rule(Config(32, 64, 4, 3), "none", causal=False),
            Rule(Config(32, 128, 8, 4), "none"),
            Rule(Config(16, 128, 8, 3), "log1p_square"),
            Rule(Config(16, 128, 8), "cumulative", gain=False, causal=False),
            Rule(Config(16, 64, 4, 3), "cumulative", gain=False, dtype=torch.float16),
            Rule(Config(32, 128, 8, 3)),
        ],
        backward_table=[
            Rule(Config(32, 32), plan=True),
            Rule(Config(64, 64, 4, 2)),
        ],
    ),
}
PACKED_ON_GEFORCE_AMPERE = PACKED | {
    128: replace(
        PACKED[128],
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
        backward_keys=GEFORCE_AMPERE[128].backward_keys,
        backward_table=[
            Rule(Config(32, 32)),
        ],
    ),
}
PACKED_ON_AMPERE = PACKED_ON_GEFORCE_AMPERE | {
    128: replace(
        PACKED_ON_GEFORCE_AMPERE[128],
        forward=[
            Rule(Config(128, 64, 8, 3)),
        ],
        backward_keys=AMPERE[128].backward_keys,
    ),
}
