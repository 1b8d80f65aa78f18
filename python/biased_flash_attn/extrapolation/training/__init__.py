"""Training of small models: resumable, and determined by its settings."""

from .checkpoints import CheckpointError
from .loop import train
from .results import remembered

__all__ = ["CheckpointError", "remembered", "train"]
