"""Configurations for a dense bias.

Tiles of the bias take shared memory and registers in addition to those of k and v, and reading them
bounds the time, so that small blocks serve all problems.
"""

from __future__ import annotations

from dataclasses import replace

from .rules import Config, Row, Rule

DENSE = {
    64: Row(
        forward=[Rule(Config(128, 64, 8, 2))],
        backward_queries=[Rule(Config(64, 32, 8, 2))],
        backward_keys=[Rule(Config(32, 64, 8, 2))],
    ),
    128: Row(
        forward=[Rule(Config(64, 64, 8, 2))],
        backward_queries=[Rule(Config(64, 32, 8, 2))],
        backward_keys=[Rule(Config(32, 64, 8, 2))],
    ),
    256: Row(
        forward=[Rule(Config(64, 16, 8))],
        backward_queries=[Rule(Config(32, 32, 8))],
        backward_keys=[Rule(Config(16, 32, 8))],
    ),
}
DENSE_ON_BLACKWELL = DENSE | {
    64: replace(
        DENSE[64],
        forward=[Rule(Config(64, 32, 4, 2))],
        backward_queries=[Rule(Config(64, 32))],
    ),
    128: replace(DENSE[128], backward_keys=[Rule(Config(16, 64))]),
}
