"""Runs an experiment."""

from __future__ import annotations

import json
import re
from pathlib import Path

from . import checkpoints
from .evaluation import evaluate
from .settings import Settings, identity
from .text import Text
from .training import train


def run(settings: Settings, text: Text, folder: Path) -> dict[str, dict[str, object]]:
    """Trains and evaluates a model for each scheme; returns the results by scheme.

    The folder contains checkpoints/SCHEME.pt and measured/SCHEME.json. Existing results of the same
    experiment are reused.

    Raises ValueError for a text that is too short, and CheckpointError for a file in the folder
    that is damaged or belongs to another experiment.
    """
    check_text(settings, text)
    return {scheme: _measured(settings, scheme, text, folder) for scheme in settings.schemes}


def check_text(settings: Settings, text: Text) -> None:
    longest = settings.eval_lengths[-1]
    if len(text.train) <= settings.train_length:
        raise ValueError(
            f"text has {len(text.train)} bytes for training; it needs over {settings.train_length}"
        )
    if len(text.test) <= longest:
        raise ValueError(f"text has {len(text.test)} bytes for testing; it needs over {longest}")


def _measured(settings: Settings, scheme: str, text: Text, folder: Path) -> dict[str, object]:
    name = re.sub("[:/]", ".", scheme)
    path = folder / "measured" / f"{name}.json"
    wanted = identity(settings, scheme, text.digest)
    if path.exists():
        return _read(path, wanted)
    checkpoint = folder / "checkpoints" / f"{name}.pt"
    model, history = train(settings, scheme, text.train, checkpoint, wanted)
    measured = {"losses": history["losses"], "seconds": {"training": history["seconds"]}}
    measured |= evaluate(settings, model, text.test)
    content = json.dumps({"identity": wanted, "measured": measured}, indent=1)
    checkpoints.write_atomically(path, content.encode())
    return measured


def _read(path: Path, wanted: dict[str, object]) -> dict[str, object]:
    try:
        saved = json.loads(path.read_text())
        identity, measured = saved["identity"], saved["measured"]
    except (ValueError, KeyError, TypeError) as error:
        raise checkpoints.CheckpointError(f"{path} is damaged; remove it to start again") from error
    checkpoints.check_identity(path, identity, wanted)
    return measured
