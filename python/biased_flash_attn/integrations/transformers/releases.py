"""What differs between the supported releases of transformers."""

from __future__ import annotations

import inspect
import warnings
from functools import cache

import transformers
from packaging.version import Version
from transformers.models.bloom.modeling_bloom import BloomModel

NEWEST_TESTED = "5.24"

# The name of a cache among the arguments and outputs of models.
CACHE = (
    "cache" if "cache" in inspect.signature(BloomModel.forward).parameters else "past_key_values"
)


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


def is_paged(value: object) -> bool:
    """Whether a `cache` is that of continuous batching, which is none of a model's caches."""
    return value is not None and not isinstance(value, transformers.Cache)
