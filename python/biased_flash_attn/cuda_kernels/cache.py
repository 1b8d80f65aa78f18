"""Compiled kernels on disk.

A file holds a SHA-256 digest of the rest, the name of the kernel, and its image. It is named after
its key, a digest of everything that determines the image, which the first digest covers too. So a
file that is damaged, truncated or of another kernel is never used. Files are written under another
name and renamed, so that other processes never see a part of one.
"""

from __future__ import annotations

import os
import secrets
from hashlib import sha256
from pathlib import Path

from .nvrtc import Kernel

FOLDER_VARIABLE = "BIASED_FLASH_ATTN_CACHE_DIR"
_DIGEST = sha256().digest_size


def folder() -> Path:
    """Returns the folder of compiled kernels: $BIASED_FLASH_ATTN_CACHE_DIR or, by default,
    biased_flash_attn in the user's cache directory."""
    if chosen := os.environ.get(FOLDER_VARIABLE):
        return Path(chosen)
    users = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(users) / "biased_flash_attn"


def load(key: str) -> Kernel | None:
    """Returns the kernel with this key, or None if there is no intact file of it."""
    try:
        content = _path(key).read_bytes()
    except (OSError, RuntimeError):  # the latter if there is no home directory
        return None
    digest, rest = content[:_DIGEST], content[_DIGEST:]
    if digest != _digest(key, rest):
        return None
    name, _, image = rest.partition(b"\0")
    return Kernel(name.decode(), image)


def store(key: str, kernel: Kernel) -> None:
    """Writes a kernel.

    Raises:
        OSError, RuntimeError: if it cannot be written, or there is no home directory; nothing is
            left behind.
    """
    path, rest = _path(key), kernel.name.encode() + b"\0" + kernel.image
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        unfinished.write_bytes(_digest(key, rest) + rest)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _path(key: str) -> Path:
    return folder() / f"{key}.kernel"


def _digest(key: str, rest: bytes) -> bytes:
    return sha256(key.encode() + rest).digest()
