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
EXCLUDED = {
    *("_vendor", "dist-packages", "encodings", "idlelib", "pydoc_data", "serialized_patterns"),
    *("site-packages", "test", "testing", "tests"),
}


@dataclass(frozen=True, eq=False)
class Text:
    """train: (T,) uint8. test: the files of the test text, (T,) uint8 each. digest: identifies the
    text."""

    train: Tensor
    test: tuple[Tensor, ...]
    digest: str


def standard_library() -> list[Path]:
    """The source files of Python's standard library, except for EXCLUDED."""
    return _sources(Path(sysconfig.get_path("stdlib")))


def read_text(path: Path | None = None) -> Text:
    """The text of a file, of all files under a folder, or by default the Python source of the
    standard library and of PyTorch.

    Several files are ordered by a hash of their names, so that neighbours are unrelated, and one in
    ten is test text. Of a single file, the last tenth is test text.
    """
    if path is None:
        installed = Path(torch.__file__).parent
        names = {file: file.relative_to(installed.parent) for file in _sources(installed)}
        library = Path(sysconfig.get_path("stdlib"))
        return _of_files(names | {file: file.relative_to(library) for file in standard_library()})
    if path.is_dir():
        return _of_files(
            {file: file.relative_to(path) for file in path.rglob("*") if file.is_file()}
        )
    content = path.read_bytes()
    cut = len(content) - len(content) // TEST_FRACTION
    return _text(content[:cut], [content[cut:]])


def _sources(root: Path) -> list[Path]:
    return [p for p in root.rglob("*.py") if not EXCLUDED & set(p.relative_to(root).parts)]


def _of_files(names: dict[Path, Path]) -> Text:
    hashes = {hashlib.sha256(name.as_posix().encode()).digest(): p for p, name in names.items()}
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for digest in sorted(hashes):
        is_test = digest[-1] % TEST_FRACTION == 0
        parts[is_test].append(hashes[digest].read_bytes())
    return _text(SEPARATOR.join(parts[False]), parts[True])


def _text(train: bytes, test: list[bytes]) -> Text:
    digest = hashlib.sha256(hashlib.sha256(train).digest())
    for content in test:
        digest.update(hashlib.sha256(content).digest())
    return Text(_bytes(train), tuple(map(_bytes, test)), digest.hexdigest())


def _bytes(content: bytes) -> Tensor:
    if not content:
        return torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
