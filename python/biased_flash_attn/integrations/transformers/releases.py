"""The newest release of transformers that is tested, and a warning of newer ones."""

from __future__ import annotations

import warnings
from functools import cache

from packaging.version import Version

NEWEST_TESTED = "5.24"


@cache
def warn_if_untested(version: str) -> None:
    """Warns of a release that is newer than the tested ones, once."""
    if Version(version).release[:2] > Version(NEWEST_TESTED).release:
        warnings.warn(
            f"transformers {version} is newer than {NEWEST_TESTED}, the newest release that"
            f" biased_flash_attn is tested with; if a model fails, install 'transformers=="
            f"{NEWEST_TESTED}.*' and report it",
            stacklevel=3,
        )
