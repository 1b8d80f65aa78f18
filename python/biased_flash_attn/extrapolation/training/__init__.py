"""Training of small models: resumable, and determined by its settings."""

from .checkpoints import CheckpointError
from .loop import History, train
from .results import Measured, Models, Results, measured, minutes, of_all

__all__ = [
    "CheckpointError",
    "History",
    "Measured",
    "Models",
    "Results",
    "measured",
    "minutes",
    "of_all",
    "train",
]
