"""Configurations for a relative bias, whose products take registers and shared memory for the
distances of a tile in addition to its pairs.

Rows apply by the sum of the width of the heads and the padded ranks of both terms. A tile has most
use of its products where it has as many queries as keys: they include 2 n distances then. Blocks
were chosen by their estimated time on an H100 and, for all other GPUs, on an A100, although part of
what a thread adds to addresses stays in memory with the larger ones: without that, backward passes
of one term are estimated to take 1.6 to 4 times as long.
"""

from __future__ import annotations

from .rules import Config, row_of

_SMALLEST = Config(16, 16, 8)
RELATIVE = {
    96: row_of(Config(64, 64), Config(64, 64), Config(32, 64, 4, 2), Config(64, 64)),
    160: row_of(Config(64, 64), Config(32, 32), Config(32, 32, 4, 2), Config(64, 64, 8)),
    192: row_of(Config(64, 64), Config(32, 32), Config(32, 32), Config(32, 32)),
    256: row_of(Config(64, 32), Config(32, 32), Config(32, 32, 8), Config(32, 32, 8)),
    288: row_of(Config(32, 32, 8), Config(32, 32, 8), Config(32, 32, 8), _SMALLEST),
    512: row_of(Config(32, 32, 8), Config(16, 16, 8), _SMALLEST, _SMALLEST),
}
RELATIVE_ON_HOPPER = RELATIVE | {
    96: row_of(Config(64, 64, 4, 3), Config(64, 64), Config(64, 64, 4, 2), Config(64, 64)),
    160: row_of(Config(64, 64), Config(64, 64), Config(32, 64, 4, 2), Config(64, 64)),
    256: row_of(Config(64, 64), Config(32, 32), Config(32, 32, 8), Config(32, 32)),
}
# Both terms spill registers at any size of block with the widest heads.
RELATIVE_FLOAT32 = {
    96: row_of(Config(16, 32, 8), Config(32, 32, 8), Config(16, 16), Config(16, 16)),
    512: row_of(_SMALLEST, _SMALLEST, Config(16, 16, 8, registers=255), _SMALLEST),
}
