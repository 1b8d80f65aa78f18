"""Configurations for a normalized bias, whose evaluation takes registers for each pair."""

from __future__ import annotations

from dataclasses import replace

from .rules import Config, Row, Rule

NORMALIZED = {
    64: Row(
        forward=[Rule(Config(128, 64, 8, 2))],
        backward_queries=[Rule(Config(64, 32, 8, 2))],
        backward_keys=[Rule(Config(32, 64, 8, 2))],
        backward_table=[Rule(Config(64, 64, 8, 2))],
    ),
    128: Row(
        forward=[Rule(Config(64, 64, 8, 2))],
        backward_queries=[Rule(Config(128, 32, 8, 2))],
        backward_keys=[Rule(Config(16, 64, 4, 2))],
        backward_table=[Rule(Config(64, 64, 8))],
    ),
    256: Row(
        forward=[Rule(Config(64, 16, 8))],
        backward_queries=[Rule(Config(32, 32, 8))],
        backward_keys=[Rule(Config(16, 32, 8))],
        backward_table=[Rule(Config(16, 16))],
    ),
}
# Without matrix units of warp groups, whose blocks have 64 rows.
NORMALIZED_ON_WARPS = NORMALIZED | {
    64: replace(NORMALIZED[64], backward_table=[Rule(Config(32, 32))]),
    128: replace(
        NORMALIZED[128],
        forward=[Rule(Config(64, 32, 8, 2))],
        backward_queries=[Rule(Config(64, 32, 8, 2))],
        backward_keys=[Rule(Config(16, 64, 8))],
        backward_table=[Rule(Config(32, 32))],
    ),
}
# Packed sequences would spill registers with the configurations above.
NORMALIZED_ON_GEFORCE_BLACKWELL = NORMALIZED_ON_WARPS | {
    64: replace(NORMALIZED_ON_WARPS[64], backward_queries=[Rule(Config(128, 16, 8, 2))]),
    128: replace(NORMALIZED_ON_WARPS[128], backward_table=[Rule(Config(32, 32, 8))]),
}
NORMALIZED_ON_BLACKWELL = NORMALIZED | {
    64: replace(
        NORMALIZED[64],
        forward=[Rule(Config(64, 32, 4, 2))],
        backward_queries=[Rule(Config(64, 32))],
    ),
}
