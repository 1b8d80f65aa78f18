"""Configurations for a normalized bias, whose evaluation takes registers for each pair.

Its loops over segments keep compilers from loading tiles ahead, so that stages make no difference.
"""

from __future__ import annotations

from .rules import Config, row_of

_OF_256 = row_of(Config(64, 16, 8), Config(32, 32, 8), Config(16, 32, 8), Config(16, 16))
NORMALIZED_ON_HOPPER = {
    64: row_of(Config(128, 32), Config(64, 64), Config(64, 64), Config(64, 64)),
    128: row_of(Config(64, 64), Config(64, 32), Config(32, 64), Config(64, 64, 8)),
    256: _OF_256,
}
NORMALIZED_ON_AMPERE = {
    64: row_of(Config(64, 64), Config(64, 32), Config(32, 64), Config(64, 64)),
    128: row_of(Config(64, 64), Config(32, 64), Config(32, 64), Config(32, 32)),
    256: _OF_256,
}
# Larger blocks would spill registers where masks or packed sequences take some.
NORMALIZED_ON_GEFORCE = {
    64: row_of(Config(64, 64), Config(32, 32), Config(32, 64), Config(32, 32)),
    128: row_of(Config(64, 32), Config(32, 32), Config(16, 64), Config(32, 32)),
    256: _OF_256,
}
NORMALIZED_ON_BLACKWELL = {
    64: row_of(Config(64, 32), Config(64, 32), Config(32, 64, 8), Config(64, 64, 8)),
    128: row_of(Config(64, 64, 8), Config(128, 32, 8), Config(16, 64), Config(64, 64, 8)),
    256: _OF_256,
}
