"""Experiments with tasks whose optimum is known."""

from .report import write_report
from .runner import run
from .settings import TASKS, Settings, Size

__all__ = ["TASKS", "Settings", "Size", "run", "write_report"]
