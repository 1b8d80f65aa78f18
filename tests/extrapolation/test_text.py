"""The text of an experiment, split into training and test text."""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn.extrapolation import experiment


def test_text_of_files_is_split_by_file(tmp_path):
    for n in range(60):
        (tmp_path / f"{n}.txt").write_text(f"<{n}>")
    read = experiment.read_text(tmp_path)
    train = bytes(read.train.tolist()).decode().split("\n")
    test = [bytes(file.tolist()).decode() for file in read.test]
    assert sorted(train + test) == sorted(f"<{n}>" for n in range(60))
    assert 1 <= len(test) <= 20
    assert experiment.read_text(tmp_path).digest == read.digest
    (tmp_path / "7.txt").write_text("<changed>")
    assert experiment.read_text(tmp_path).digest != read.digest


def test_text_of_one_file_is_split(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(100)))
    read = experiment.read_text(path)
    assert read.train.tolist() == list(range(90))
    (test,) = read.test
    assert test.tolist() == list(range(90, 100))


def test_default_text_is_python():
    read = experiment.read_text()
    assert len(read.train) > 5 * sum(map(len, read.test)) > 5 * 10**6
    assert len(read.test) > 100
    assert sum(b"def " in bytes(file.tolist()) for file in read.test) > len(read.test) / 2


def test_tokens_of_a_larger_vocabulary_are_pairs_of_the_text(tmp_path, capsys):
    lines = "def функция(число):\n\treturn число\n".encode() + b"\xff\n"
    for n in range(40):
        (tmp_path / f"{n}.txt").write_bytes(20 * lines)
    read, short = experiment.read_text(tmp_path), experiment.read_text(tmp_path, 300)
    assert len(short.train) < len(read.train) / 4
    assert len(short.test) == len(read.test)
    assert 256 <= torch.cat([short.train, *short.test]).max() < 300
    assert short.digest not in (read.digest, experiment.read_text(tmp_path, 270).digest)
    again = experiment.read_text(tmp_path, 300)
    assert torch.equal(again.train, short.train)
    assert again.digest == short.digest
    assert not capsys.readouterr().out
    with pytest.raises(ValueError, match=r"^vocabulary is 255; it must be 256 or more"):
        experiment.read_text(tmp_path, 255)
