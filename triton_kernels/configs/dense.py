"""Configurations for a dense bias.

Tiles of the bias take shared memory and registers in addition to those of k and v, and reading them
bounds the time, so that small blocks serve all problems.
"""

from __future__ import annotations

from .rules import Config, row_of

_OF_256 = row_of(Config(64, 16, 8), Config(32, 32, 8), Config(16, 32, 8))
DENSE_ON_HOPPER = {
    64: row_of(Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(32, 64, 4, 3)),
    128: row_of(Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(32, 64)),
    256: _OF_256,
}
DENSE_ON_AMPERE = {
    64: row_of(Config(64, 64, 4, 2), Config(64, 32, 4, 2), Config(32, 64, 4, 2)),
    128: row_of(Config(64, 32, 4, 2), Config(64, 32, 4, 2), Config(32, 64, 4, 2)),
    256: _OF_256,
}
# Larger blocks would spill registers.
DENSE_ON_GEFORCE = DENSE_ON_AMPERE | {
    64: row_of(Config(64, 32, 4, 2), Config(64, 32, 4, 2), Config(32, 64, 4, 2)),
    128: row_of(Config(64, 32, 4, 2), Config(32, 32, 4, 2), Config(32, 64, 4, 2)),
}
DENSE_ON_BLACKWELL = {
    64: row_of(Config(64, 32, 4, 2), Config(64, 32), Config(32, 64, 8, 2)),
    128: row_of(Config(64, 64, 8, 2), Config(64, 32, 8, 2), Config(16, 64)),
    256: _OF_256,
}
