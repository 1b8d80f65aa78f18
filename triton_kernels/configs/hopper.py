"""Hopper: wgmma, with matrix products issued one tile ahead."""

from __future__ import annotations

import torch

from .common import WIDEST
from .rules import Config, Row, Rule

HOPPER = {
    64: Row(
        forward=[
            Rule(Config(128, 64, 8, 2, ahead=True), "log1p_square", causal=False),
            Rule(Config(128, 64, 8, 2, ahead=True), "log1p_square", window=True),
            Rule(Config(128, 128, 8, 2, ahead=True), "none", window=True),
            Rule(Config(128, 64, 4, 3, ahead=True)),
        ],
        backward_queries=[
            Rule(Config(64, 64, 4, 3, ahead=True)),
        ],
        backward_keys=[
            Rule(Config(32, 64, 4, 2, ahead=True), "log1p_square"),
            Rule(Config(32, 128, 8, 2, ahead=True), "cumulative", wide_offsets=True),
            Rule(Config(32, 128, 8, 2, ahead=True), "cumulative", plan=True, causal=False),
            Rule(Config(64, 128, 8, 2, ahead=True), "cumulative", causal=False),
            Rule(Config(64, 128, 8, 2, ahead=True), "cumulative", gain=True),
            Rule(Config(64, 128, 8, 2, ahead=True), "distance", wide_offsets=True),
            Rule(Config(64, 64, 4, 3, ahead=True)),
        ],
        backward_table=[
            Rule(Config(64, 64, 4, 2)),
        ],
    ),
    128: Row(
        forward=[
            Rule(Config(128, 64, 8, 2, ahead=True), "cumulative", window=True),
            Rule(Config(128, 64, 8, 2, ahead=True), "cumulative", plan=True, causal=False),
            Rule(Config(128, 64, 8, 2), "cumulative", gain=True, plan=True, dtype=torch.float16),
            Rule(Config(128, 128, 8, 2), "linear", plan=True),
            Rule(Config(128, 128, 8, 2), "cumulative", plan=True),
            Rule(Config(128, 32, 8, 2), "log1p_square", causal=False),
            Rule(Config(128, 32, 8, 2), "log1p_square", window=True),
            Rule(Config(128, 64, 8, 2, ahead=True), "log1p_square"),
            Rule(Config(128, 64, 8, 2, ahead=True), "distance", plan=True),
            Rule(Config(128, 128, 8, 2, ahead=True)),
        ],
        backward_queries=[
            Rule(Config(128, 32, 8, 2), "cumulative", gain=True, plan=True, dtype=torch.float16),
            Rule(Config(128, 32, 8, 2), "cumulative", gain=True, window=True, dtype=torch.float16),
            Rule(Config(128, 64, 8, 2), "cumulative", plan=True),
            Rule(Config(128, 32, 8, 2, ahead=True), "log1p_square"),
            Rule(Config(128, 64, 8, 2, ahead=True), "linear", plan=True, dtype=torch.float16),
            Rule(Config(128, 64, 8, 3, ahead=True)),
        ],
        backward_keys=[
            Rule(Config(16, 128, 8, 2), "cumulative", wide_offsets=True),
            Rule(Config(16, 128, 8, 2), "cumulative", plan=True, causal=False),
            Rule(Config(16, 128, 8, 2), "cumulative", dtype=torch.float16, causal=False),
            Rule(Config(16, 128, 8, 2), "cumulative", dtype=torch.float16, window=True),
            Rule(Config(32, 128, 8, 2), "cumulative", plan=True),
            Rule(Config(32, 128, 8, 2), "cumulative", gain=True, dtype=torch.float16),
            Rule(Config(16, 128, 8, ahead=True), "log1p_square"),
            Rule(Config(32, 128, 8, 2, ahead=True), "cumulative"),
            Rule(Config(32, 64, 4, 3, ahead=True)),
        ],
        backward_table=[
            Rule(Config(64, 64, 8), plan=True),
            Rule(Config(64, 64)),
        ],
    ),
    256: WIDEST,
}
