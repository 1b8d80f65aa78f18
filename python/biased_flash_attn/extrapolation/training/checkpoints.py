"""Checkpoints that are written atomically and belong to one experiment."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from pathlib import Path

import torch

MAGIC = b"biased_flash_attn checkpoint 1\n"


class CheckpointError(ValueError):
    """A checkpoint is damaged, or belongs to another experiment."""


def write_atomically(path: Path, content: bytes) -> None:
    """Replaces the file, which keeps its old content if the process or the machine stops."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def save(path: Path, identity: dict[str, object], state: dict[str, object]) -> None:
    """Saves tensors and plain values; identity describes the experiment they belong to."""
    buffer = io.BytesIO()
    torch.save({"identity": identity, "state": state}, buffer)
    content = buffer.getvalue()
    write_atomically(path, MAGIC + hashlib.sha256(content).digest() + content)


def load(path: Path, identity: dict[str, object], device: str) -> dict[str, object] | None:
    """The saved state, or None if there is no checkpoint.

    Raises CheckpointError if it is damaged or its identity differs.
    """
    if not path.exists():
        return None
    stored = path.read_bytes()
    digest = stored[len(MAGIC) : len(MAGIC) + 32]
    content = stored[len(MAGIC) + 32 :]
    if not stored.startswith(MAGIC) or hashlib.sha256(content).digest() != digest:
        raise CheckpointError(f"{path} is damaged, or not a checkpoint; remove it to start again")
    try:
        saved = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(f"{path} holds more than tensors and plain values") from error
    check_identity(path, saved["identity"], identity)
    return saved["state"]


def check_identity(path: Path, found: dict[str, object], wanted: dict[str, object]) -> None:
    """Raises CheckpointError with the values that differ."""
    names = [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]
    if names:
        differences = "; ".join(
            f"{name} is {found.get(name)}, here {wanted.get(name)}" for name in names
        )
        raise CheckpointError(
            f"{path} is of another experiment ({differences}); remove it, or write elsewhere"
        )
