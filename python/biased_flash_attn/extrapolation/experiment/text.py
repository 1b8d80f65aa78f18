"""The text of an experiment: bytes of files, split by file into training and test text."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

TEST_FRACTION = 10  # one file in ten is test text, or the last tenth of a single file
SEPARATOR = b"\n"
# Excluded folders: third-party packages, tests, and tables written as code.
EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}


@dataclass(frozen=True, eq=False)
class Text:
    """train and test: (T,) uint8. digest: identifies the text."""

    train: Tensor
    test: Tensor
    digest: str


def standard_library() -> list[Path]:
    """The source files of Python's standard library, except for EXCLUDED."""
    root = Path(sysconfig.get_path("stdlib"))
    return [p for p in root.rglob("*.py") if not EXCLUDED & set(p.relative_to(root).parts)]


def read_text(path: Path | None = None) -> Text:
    """The text of a file, of all files under a folder, or by default of the standard library.

    Several files are ordered by a hash of their names, so that neighbours are unrelated, and one in
    ten is test text. Of a single file, the last tenth is test text.
    """
    if path is None:
        return _of_files(standard_library(), Path(sysconfig.get_path("stdlib")))
    if path.is_dir():
        return _of_files([p for p in path.rglob("*") if p.is_file()], path)
    content = path.read_bytes()
    cut = len(content) - len(content) // TEST_FRACTION
    return _text(content[:cut], content[cut:])


def _of_files(paths: list[Path], root: Path) -> Text:
    hashes = {hashlib.sha256(p.relative_to(root).as_posix().encode()).digest(): p for p in paths}
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for digest in sorted(hashes):
        is_test = digest[-1] % TEST_FRACTION == 0
        parts[is_test].append(hashes[digest].read_bytes())
    return _text(SEPARATOR.join(parts[False]), SEPARATOR.join(parts[True]))


def _text(train: bytes, test: bytes) -> Text:
    digest = hashlib.sha256(hashlib.sha256(train).digest() + hashlib.sha256(test).digest())
    return Text(_bytes(train), _bytes(test), digest.hexdigest())


def _bytes(content: bytes) -> Tensor:
    if not content:
        return torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
