"""What causal models and encoders predict, against windows by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F

from biased_flash_attn.cli import main
from biased_flash_attn.extrapolation import experiment
from biased_flash_attn.extrapolation.experiment import report, runner
from biased_flash_attn.extrapolation.experiment.counts import losses_of_counts
from biased_flash_attn.extrapolation.experiment.objective import OBJECTIVES
from biased_flash_attn.nn import Encoder

from .tables import rows

SIZE = experiment.Size(1, 16, 2, 6, 2, 1e-3, blocks=10, gradients=2)
SETTINGS = experiment.Settings(
    ("cable", "learned"), 16, (16, 32), SIZE, dtype="float32", objective="masked"
)
MASKED, MASK = OBJECTIVES["masked"], 256


@pytest.fixture
def text() -> experiment.Text:
    train, *test = torch.randint(256, (4, 1000)).to(torch.uint8)
    return experiment.Text(train, tuple(test), digest="random")


class Recorder(torch.nn.Module):
    """Predicts token n + 1 at position n, and keeps the tokens that it is given."""

    def __init__(self):
        super().__init__()
        self.calls: list[torch.Tensor] = []

    def forward(self, tokens):
        self.calls.append(tokens)
        return (
            F.one_hot(torch.arange(1, tokens.shape[1] + 1), MASK + 1)
            .float()
            .expand(len(tokens), -1, -1)
        )


@pytest.mark.parametrize("length", [20, 21, 37, 40])
def test_the_same_masked_tokens_are_predicted_at_every_length(length):
    longest, scored, count = 40, 20, 50
    segments = torch.arange(longest + 1).expand(count, -1).to(torch.uint8)
    whole, part = Recorder(), Recorder()
    MASKED.losses(whole, segments, longest, scored, MASK)
    start = (longest - length) // 2
    losses = MASKED.losses(part, segments, length, scored, MASK)
    (tokens,), (inputs,) = whole.calls, part.calls
    assert torch.equal(inputs, tokens[:, start : start + length]), "in the middle, equal masks"

    middle = tokens[:, 10:30]
    assert ((middle == MASK).sum(1) == 3).all(), "15 % of 20"
    assert ((tokens == MASK).sum(1) - 3 <= 6).all(), "15 % of 40, of those outside of the middle"
    assert (tokens[:, 30:] == MASK).any()
    assert torch.equal(tokens[tokens != MASK], (segments[:, 1:][tokens != MASK]).long())
    assert len(tokens.unique(dim=0)) > 40
    # The tokens of the longest window are those that the recorder predicts.
    hit = -torch.eye(MASK + 1)[0].log_softmax(0)[0]
    assert losses.shape == (count, 3)
    assert torch.allclose(losses, hit.double(), rtol=1e-5) == (start == 0)


def test_masked_examples_hide_what_they_ask_for():
    segments = torch.randint(256, (64, 41)).to(torch.uint8)
    tokens, targets = MASKED.examples(segments, MASK, torch.Generator().manual_seed(0))
    hidden = tokens == MASK
    assert (hidden.sum(1) == 6).all()
    assert hidden.any(0).all()
    assert torch.equal(targets[hidden], segments[:, 1:].long()[hidden])
    assert torch.equal(tokens[~hidden], segments[:, 1:].long()[~hidden])
    assert (targets[~hidden] == -100).all()


def test_counts_predict_the_same_tokens():
    train = torch.randint(8, (500,)).to(torch.uint8)
    segments = torch.randint(8, (30, 41)).to(torch.uint8)
    causal = OBJECTIVES["causal"].counted(train, segments, 16, 8)
    masked = MASKED.counted(train, segments, 16, 8)
    recorder = Recorder()
    MASKED.losses(recorder, segments, 16, 16, MASK)
    (tokens,) = recorder.calls
    assert masked.shape == (30, 2)
    for n, segment in enumerate(segments):
        expected = losses_of_counts(train, segment, 8)
        assert torch.equal(causal[n], expected[-16:])
        # The middle begins at token 1 + 12 of the segment, and losses at token 3.
        assert torch.equal(masked[n], expected[10:26][tokens[n] == MASK])


def test_the_least_length_has_a_context_for_the_model_of_counts():
    for objective in OBJECTIVES.values():
        segments = torch.randint(256, (3, objective.shortest + 1)).to(torch.uint8)
        scored = objective.shortest - objective.unscored
        assert objective.counted(segments[0], segments, scored, 256).shape == (3, 1)


def test_encoders_are_trained_and_evaluated(text, tmp_path):
    results = experiment.run(SETTINGS, text, tmp_path)
    assert isinstance(runner.new_model(SETTINGS, "cable", 0), Encoder)
    assert results["cable"][0]["nats"].keys() == {"16", "32"}
    assert results["learned"][0]["nats"].keys() == {"16"}
    found = report.markdown(SETTINGS, results, report.Reference.of(SETTINGS, text))
    assert [row[0] for row in rows(found)[:4]] == ["scheme", "counts", "cable", "learned"]
    assert "20 bytes of 3 file(s) are predicted, 2 of the 12 in the middle of each window" in found
    assert "Receptive fields" not in found
    causal = replace(SETTINGS, objective="causal")
    with pytest.raises(experiment.CheckpointError, match="objective is masked, here causal"):
        experiment.run(causal, text, tmp_path)


@pytest.mark.slow
def test_encoders_learn_what_only_later_tokens_tell(tmp_path):
    """Tokens come in equal pairs. Whatever came before, the first of a pair is random, so that no
    model of earlier tokens has a loss below ln(8) / 2."""

    def pairs(count: int) -> torch.Tensor:
        return torch.randint(8, (count,)).repeat_interleave(2).to(torch.uint8)

    size = replace(SIZE, dim=32, steps=400, batch=32, rate=1e-2, blocks=64, vocabulary=8)
    these = replace(SETTINGS, schemes=("rotary",), eval_lengths=(16,), size=size)
    text = experiment.Text(pairs(20000), (pairs(2000),), digest="pairs")
    (loss,) = experiment.run(these, text, tmp_path)["rotary"][0]["nats"]["16"]
    assert loss < 0.95 * math.log(8) / 2


def test_command_trains_encoders(tmp_path, monkeypatch):
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(bytes(torch.randint(32, 128, (20000,)).tolist()))
    monkeypatch.setitem(experiment.SIZES, "small", SIZE)
    options = {"objective": "masked", "biases": "alibi", "seeds": "0", "text": str(corpus)}
    options |= {"train-length": "16", "eval-lengths": "16..32", "output": str(tmp_path / "out")}
    arguments = [x for name, value in options.items() for x in (f"--{name}", value)]
    done = CliRunner().invoke(main, ["extrapolate", *arguments])
    assert done.exit_code == 0, done.output
    assert "which are masked like 15% of all bytes" in done.stdout


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"objective": "next"}, "objective is 'next'; it may be causal or masked"),
        ({"eval_lengths": (4, 16)}, r"eval_lengths is \(4, 16\); the shortest may be 5"),
        ({"schemes": ("alibi", "window(8)")}, r"schemes has window\(8\); windows need objective"),
        ({"cache": 8}, "cache is 8; it needs objective 'causal'"),
    ],
)
def test_what_only_causal_models_have_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **change)
