"""Configurations for a relative bias, whose products take registers and shared memory for the
distances of a tile in addition to its pairs.

Rows apply by the sum of the width of the heads and the padded ranks of both terms. A tile has most
use of its products where it has as many queries as keys: they include 2 n distances then. In half
precision, tiles within a band have half of the keys, or of the queries in backward_keys.
"""

from __future__ import annotations

from .rules import Config, Row, Rule


def _row(forward: Config, queries: Config, keys: Config, table: Config) -> Row:
    return Row(*([Rule(config)] for config in (forward, queries, keys, table)))


_SMALLEST = Config(16, 16, 8)
RELATIVE = {
    96: _row(Config(64, 64, 8, 2), Config(32, 32, 4, 2), Config(32, 64, 8), Config(32, 32)),
    160: _row(Config(64, 64, 8), Config(32, 32, 8, 2), Config(32, 32, 8), Config(32, 32, 8)),
    192: _row(Config(32, 32, 8, 2), Config(32, 32, 8, 2), Config(32, 32, 8), _SMALLEST),
    256: _row(Config(32, 32, 8), Config(32, 16, 8), _SMALLEST, _SMALLEST),
    288: _row(Config(32, 32, 8), Config(32, 32, 8), Config(16, 32, 8), _SMALLEST),
    512: _row(_SMALLEST, _SMALLEST, _SMALLEST, _SMALLEST),
}
RELATIVE_ON_HOPPER = RELATIVE | {
    96: Row(
        forward=[
            Rule(Config(64, 128, 8, 2), "relative"),
            Rule(Config(64, 64, 8, 2)),
        ],
        backward_queries=[
            Rule(Config(32, 64, 8, 2), "relative"),
            Rule(Config(32, 32, 4, 2)),
        ],
        backward_keys=[
            Rule(Config(64, 64, 8, 2), "relative"),
            Rule(Config(32, 64, 8)),
        ],
        backward_table=[
            Rule(Config(32, 32)),
        ],
    ),
}
# float32: products of two terms spill registers at any size of block.
RELATIVE_FLOAT32 = {
    96: _row(Config(16, 32, 8), Config(32, 32, 8), Config(16, 16), Config(16, 16)),
    512: _row(_SMALLEST, _SMALLEST, _SMALLEST, _SMALLEST),
}
