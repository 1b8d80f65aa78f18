"""Experiments with small models that differ only in their position scheme."""

from ..training import CheckpointError
from .objective import OBJECTIVES
from .runner import check_text, run
from .settings import DTYPES, SIZES, Settings, Size, doublings
from .text import Text, read_text

__all__ = [
    "DTYPES",
    "OBJECTIVES",
    "SIZES",
    "CheckpointError",
    "Settings",
    "Size",
    "Text",
    "check_text",
    "doublings",
    "read_text",
    "run",
]
