"""The loop of training: its checkpoints, interruptions, weight decay and learning rate."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from biased_flash_attn.extrapolation.training import CheckpointError, checkpoints, loop
from biased_flash_attn.nn import CausalLM

IDENTITY = {"seed": 0, "text": "random"}


def batches(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (2, 17), generator=loop.generator(0, step))
    return tokens[:, :-1], tokens[:, 1:]


def trained(path: Path, batches: loop.Batches = batches) -> dict[str, object]:
    """Parameters and losses of a training run that resumes from the path."""
    torch.manual_seed(0)
    model = CausalLM(256, 16, 1, 2, "alibi")
    options = {"steps": 6, "rate": 1e-3, "autocast": nullcontext(), "name": "alibi"}
    history = loop.train(model, batches, path, IDENTITY, **options)
    return {"losses": history["losses"], **model.state_dict()}


def assert_same(first: dict[str, object], second: dict[str, object]) -> None:
    """Bit for bit."""
    assert first["losses"] == second["losses"]
    for name in first.keys() - {"losses"}:
        assert torch.equal(first[name], second[name]), name


def test_interrupted_training_resumes(tmp_path):
    handler = signal.getsignal(signal.SIGINT)  # a background process ignores it
    whole = trained(tmp_path / "whole.pt")

    def interrupted(step: int) -> tuple[Tensor, Tensor]:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
        return batches(step)

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "stopped.pt", interrupted)
    state = checkpoints.load(tmp_path / "stopped.pt", IDENTITY, "cpu")
    assert state["losses"] == whole["losses"][:4], "the interrupted step is completed"
    assert_same(trained(tmp_path / "stopped.pt"), whole)
    assert_same(trained(tmp_path / "stopped.pt"), whole)
    assert signal.getsignal(signal.SIGINT) is handler


def test_damaged_or_foreign_checkpoints_are_refused(tmp_path):
    path = tmp_path / "checkpoint.pt"
    trained(path)
    whole = path.read_bytes()
    at = int(torch.randint(len(whole), ()))
    for damaged in (
        b"",
        whole[: len(whole) // 2],
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
        b"some other file",
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"checkpoint.pt is damaged, or not"):
            trained(path)
    path.write_bytes(whole)
    foreign = {"seed": 1, "text": "another"}
    with pytest.raises(CheckpointError, match=r"seed is 0, here 1; text is random"):
        checkpoints.load(path, foreign, "cpu")
    assert checkpoints.load(tmp_path / "none.pt", IDENTITY, "cpu") is None


def test_checkpoints_contain_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "run"),)

    path = tmp_path / "evil.pt"
    checkpoints.save(path, IDENTITY, {"model": Evil()})
    with pytest.raises(CheckpointError, match=r"holds more than tensors and plain"):
        checkpoints.load(path, IDENTITY, "cpu")
    assert not (tmp_path / "run").exists()


def test_files_are_written_atomically(tmp_path, monkeypatch):
    path = tmp_path / "file"
    checkpoints.write_atomically(path, b"before")

    def full(file):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"no space left"):
        checkpoints.write_atomically(path, b"after")
    assert path.read_bytes() == b"before"


@pytest.mark.parametrize("scheme", ["kerple_log", "t5", "fire", "cable", "alibi(trainable=True)"])
def test_weight_decay_leaves_biases_alone(scheme):
    model = CausalLM(256, 16, 2, 2, scheme)
    optimizer = torch.optim.AdamW(loop.parameter_groups(model), lr=1.0, weight_decay=0.01)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    of_biases = [name for name in before if ".attention.bias." in name]
    assert of_biases
    for name, parameter in model.named_parameters():
        decayed = before[name] if name in of_biases else 0.99 * before[name]
        torch.testing.assert_close(parameter.detach(), decayed)


def test_every_parameter_is_trained_once():
    model = CausalLM(256, 16, 2, 2, "cable")
    groups = loop.parameter_groups(model)
    trained = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(trained) == sorted(id(parameter) for parameter in model.parameters())


def test_learning_rate_rises_and_falls():
    rates = [loop.schedule(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
