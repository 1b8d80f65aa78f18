"""Results of models that are computed once and kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from .checkpoints import CheckpointError, check_identity, write_atomically


def remembered(
    path: Path, identity: dict[str, object], measure: Callable[[], dict[str, object]]
) -> dict[str, object]:
    """The results in a file, or those of measure(), which are then saved there.

    Raises CheckpointError for a file that is damaged or belongs to another experiment.
    """
    if path.exists():
        return _read(path, identity)
    measured = measure()
    content = json.dumps({"identity": identity, "measured": measured}, indent=1)
    write_atomically(path, content.encode())
    return measured


def _read(path: Path, wanted: dict[str, object]) -> dict[str, object]:
    try:
        saved = json.loads(path.read_text())
        identity, measured = saved["identity"], saved["measured"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged; remove it to start again") from error
    check_identity(path, identity, wanted)
    return measured
