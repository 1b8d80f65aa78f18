"""Checkpoints that are whole or not there, and that are refused where they do not belong."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path

import torch

MAGIC = b"biased_flash_attn checkpoint 1\n"


class CheckpointError(ValueError):
    """A checkpoint is damaged, or of another experiment."""


def write_atomically(path: Path, content: bytes) -> None:
    """All of the content, or what was there before: whenever the process or the machine stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.partial")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def save(path: Path, identity: dict[str, object], state: dict[str, object]) -> None:
    """Saves tensors and plain values; identity says which experiment they are of."""
    buffer = io.BytesIO()
    torch.save({"identity": identity, "state": state}, buffer)
    content = buffer.getvalue()
    write_atomically(path, MAGIC + hashlib.sha256(content).digest() + content)


def load(path: Path, identity: dict[str, object], device: str) -> dict[str, object] | None:
    """The state that was saved, or None where there is no checkpoint.

    Raises CheckpointError where it is damaged or its identity is another one.
    """
    if not path.exists():
        return None
    stored = path.read_bytes()
    digest = stored[len(MAGIC) : len(MAGIC) + 32]
    content = stored[len(MAGIC) + 32 :]
    if not stored.startswith(MAGIC) or hashlib.sha256(content).digest() != digest:
        raise CheckpointError(f"{path} is damaged, or no checkpoint; remove it to begin anew")
    try:
        saved = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds more than tensors and plain values") from error
    refuse_foreign(path, saved["identity"], identity)
    return saved["state"]


def refuse_foreign(path: Path, found: dict[str, object], wanted: dict[str, object]) -> None:
    """Raises CheckpointError that names what differs."""
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    if names:
        differences = "; ".join(
            f"{name} is {found.get(name)}, here {wanted.get(name)}" for name in names
        )
        raise CheckpointError(
            f"{path} is of another experiment ({differences}); remove it, or write elsewhere"
        )
