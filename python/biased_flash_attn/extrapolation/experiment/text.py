"""The text of an experiment: files, split by file into training and test text."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .settings import BYTES

TEST_FRACTION = 10  # one file in ten is test text, or the last tenth of a single file
SEPARATOR = b"\n"
# Excluded folders: third-party packages, tests, and tables written as code.
EXCLUDED = {
    *("_vendor", "dist-packages", "encodings", "idlelib", "pydoc_data", "serialized_patterns"),
    *("site-packages", "test", "testing", "tests"),
}


@dataclass(frozen=True, eq=False)
class Text:
    """train: (T,) integers. test: (T,) integers of each file. digest: identifies the text."""

    train: Tensor
    test: tuple[Tensor, ...]
    digest: str


def standard_library() -> list[Path]:
    """The source files of Python's standard library, except for EXCLUDED."""
    return _sources(Path(sysconfig.get_path("stdlib")))


def read_text(path: Path | None = None, vocabulary: int = BYTES) -> Text:
    """The text of a file, of all files under a folder, or by default the Python source of the
    standard library and of PyTorch.

    Several files are ordered by a hash of their names, so that neighbours are unrelated, and one in
    ten is test text. Of a single file, the last tenth is test text.

    Tokens are bytes, or pairs of more frequent tokens, found in the training text (byte-pair
    encoding; Sennrich et al., 2016), if the vocabulary is larger. It needs the package tokenizers,
    an optional dependency.
    """
    text = _read(path)
    return text if vocabulary == BYTES else encoded(text, vocabulary)


def _read(path: Path | None) -> Text:
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
    return Text(_bytes(train), tuple(map(_bytes, test)), _digest([train, *test]))


def _bytes(content: bytes) -> Tensor:
    if not content:
        return torch.zeros(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def encoded(text: Text, vocabulary: int) -> Text:
    """The text in at most `vocabulary` different tokens, among which are all bytes.

    Bytes that are not UTF-8 are replaced.
    """
    if vocabulary < BYTES:
        raise ValueError(f"vocabulary is {vocabulary}; it must be {BYTES} or more")
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        raise ValueError(
            f"vocabulary is {vocabulary}; other than {BYTES} it needs: pip install tokenizers"
        ) from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    train = _lines(text.train)
    tokenizer.train_from_iterator(train, trainer)

    def encode(lines: list[str]) -> Tensor:
        found = tokenizer.encode_batch_fast(lines)
        return torch.tensor([token for line in found for token in line.ids], dtype=torch.int32)

    parts = [encode(train), *(encode(_lines(file)) for file in text.test)]
    digest = _digest(part.numpy().tobytes() for part in parts)
    return Text(parts[0], tuple(parts[1:]), digest)


def _lines(tokens: Tensor) -> list[str]:
    return tokens.numpy().tobytes().decode(errors="replace").splitlines(keepends=True)


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
