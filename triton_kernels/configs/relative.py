"""Configurations for a relative bias, whose products take registers and shared memory for the
distances of a tile in addition to its pairs."""

from __future__ import annotations

from .rules import Config, Row, Rule

RELATIVE = {
    64: Row(
        forward=[Rule(Config(64, 32, 4, 2))],
        backward_queries=[Rule(Config(64, 32, 4, 2))],
        backward_keys=[Rule(Config(32, 64, 8, 2))],
        backward_table=[Rule(Config(32, 32))],
    ),
    128: Row(
        forward=[Rule(Config(64, 32, 8, 2))],
        backward_queries=[Rule(Config(64, 32, 8))],
        backward_keys=[Rule(Config(32, 32, 8))],
        backward_table=[Rule(Config(32, 32, 8))],
    ),
    256: Row(
        forward=[Rule(Config(32, 16, 8))],
        backward_queries=[Rule(Config(32, 16, 8))],
        backward_keys=[Rule(Config(16, 16, 8))],
        backward_table=[Rule(Config(16, 16, 8))],
    ),
}
