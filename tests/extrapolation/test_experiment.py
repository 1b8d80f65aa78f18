"""The experiment runner: results of the papers, and interruptions."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from biased_flash_attn import biases
from biased_flash_attn.cli import main
from biased_flash_attn.extrapolation import experiment, normalized_receptive_field
from biased_flash_attn.extrapolation.experiment import evaluation, report, runner, settings
from biased_flash_attn.extrapolation.experiment.uncertainty import Sample
from biased_flash_attn.extrapolation.formulas import formula_of
from biased_flash_attn.extrapolation.perplexity import segment_losses
from biased_flash_attn.nn import CausalLM

TINY = experiment.Size(1, 16, 2, 6, 2, 1e-3, blocks=10, gradients=2)
SETTINGS = experiment.Settings(("alibi",), 16, (16, 32), TINY, dtype="float32")
IDENTITY = settings.identity(SETTINGS, "alibi", 0, "random")


@pytest.fixture
def text() -> experiment.Text:
    train, *test = torch.randint(256, (4, 1000)).to(torch.uint8)
    return experiment.Text(train, tuple(test), digest="random")


@pytest.mark.slow
def test_toy_experiment_reproduces_the_papers(tmp_path, seed):
    """Trained on 32 bytes of real text and evaluated on up to 256."""
    size = experiment.Size(2, 32, 4, 350, 16, 5e-3, blocks=64, gradients=4)
    schemes = ("sinusoidal", "rotary", "learned", "window(8)", "alibi", "cable")
    these = experiment.Settings(schemes, 32, (32, 64, 128, 256), size, (seed,), dtype="float32")
    text = experiment.read_text()
    results = experiment.run(these, text, tmp_path)
    reference = report.Reference.of(these, text)
    sample = Sample(reference.blocks)

    for scheme in schemes:
        losses = results[scheme][seed]["losses"]
        assert losses[-1] < 0.75 * losses[0], f"{scheme} learned nothing"
        found = [report.nats(results[scheme], length) for length in these.eval_lengths]
        trained_at, *longer = (math.exp(sample.interval(x).mean) for x in found if x is not None)
        fields = results[scheme][seed].get("gradient", {}).get("receptive_fields")
        if scheme == "learned":
            assert not longer, "there are no embeddings beyond those of training"
        elif scheme in ("sinusoidal", "rotary"):
            assert max(longer) > 1.08 * trained_at, scheme
            assert max(fields["embedding"]) > 32, scheme
        else:
            assert max(longer) < 1.04 * trained_at, scheme
        if scheme == "window(8)":
            assert max(fields["embedding"]) <= 2 * 8 - 1
            assert max(fields["blocks.0"]) <= 8


COMMAND = ["extrapolate", "--biases", "alibi", "--train-length", "32", "--eval-lengths", "32..64"]
COMMAND += ["--seeds", "0"]


def test_killed_runs_resume_with_the_same_table(tmp_path, monkeypatch):
    """SIGKILL leaves no time to save, so the run resumes from the last checkpoint."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(bytes(torch.randint(32, 128, (20000,)).tolist()))
    command = [*COMMAND, "--text", str(corpus), "--steps", "12", "--dtype", "float32"]
    script = (
        "import os, signal\n"
        "from biased_flash_attn.cli import main\n"
        "from biased_flash_attn.extrapolation import experiment\n"
        "from biased_flash_attn.extrapolation.experiment import runner\n"
        "from biased_flash_attn.extrapolation.training import loop\n"
        f"experiment.SIZES['small'] = experiment.{TINY}\n"
        "loop.SECONDS_BETWEEN_CHECKPOINTS = 0\n"
        "drawn = runner.batch\n"
        "def killed(settings, seed, text, step):\n"
        "    if step == 7: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return drawn(settings, seed, text, step)\n"
        "runner.batch = killed\n"
        f"main({[*command, '--output', str(tmp_path / 'killed')]})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (tmp_path / "killed" / "table.md").exists()

    monkeypatch.setitem(experiment.SIZES, "small", TINY)
    seen = []
    drawn = runner.batch
    monkeypatch.setattr(runner, "batch", lambda *a: seen.append(a[-1]) or drawn(*a))
    for folder in ("killed", "whole"):
        invoked = CliRunner().invoke(main, [*command, "--output", str(tmp_path / folder)])
        assert invoked.exit_code == 0, invoked.output
    assert seen == [*range(7, 12), *range(12)]
    table, whole = ((tmp_path / folder / "table.md").read_text() for folder in ("killed", "whole"))
    assert table == whole
    record = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert record["settings"]["seeds"] == [0]
    assert set(record["versions"]) == {"biased_flash_attn", "torch", "python"}
    assert len(record["results"]["alibi"]["0"]["losses"]) == 12
    assert (tmp_path / "whole" / "results.png").read_bytes().startswith(b"\x89PNG")
    assert "Perplexity by context" in (tmp_path / "whole" / "results.html").read_text()
    names = ("table.md", "results.json", "results.png", "results.html")
    for name in names:
        assert f"saved {tmp_path / 'whole' / name}" in invoked.output
    assert report.markdown(*report.read_report(tmp_path / "whole" / "results.json")) == whole
    read = experiment.read_text(corpus)
    sizes = f"{len(read.train)} bytes for training, and {len(read.test[0])} for testing"
    assert f"The text has {sizes}." in table
    (nats,) = record["results"]["alibi"]["0"]["nats"]["64"]
    assert f"{math.exp(nats):.4g}" in table


def test_results_of_another_experiment_are_refused(text, tmp_path):
    experiment.run(SETTINGS, text, tmp_path)
    again = experiment.run(SETTINGS, text, tmp_path)
    assert again["alibi"][0]["nats"].keys() == {"16", "32"}
    foreign = experiment.Text(text.train, text.test, "another")
    with pytest.raises(experiment.CheckpointError, match=r"alibi-0.json is of .*text is random, h"):
        experiment.run(SETTINGS, foreign, tmp_path)
    (tmp_path / "measured" / "alibi-0.json").write_text("{")
    with pytest.raises(experiment.CheckpointError, match=r"alibi-0.json is damaged"):
        experiment.run(SETTINGS, text, tmp_path)


def test_results_follow_their_definitions(text, tmp_path):
    model, _ = runner.trained(SETTINGS, "alibi", 0, text.train, tmp_path / "x.pt", IDENTITY)
    chosen = runner.blocks_of(SETTINGS, text)
    found = evaluation.evaluate(SETTINGS, chosen, model)
    for length in SETTINGS.eval_lengths:
        losses = {0: [], 1: [], 2: []}
        for number, segment in zip(chosen.files.tolist(), chosen.segments, strict=True):
            window = segment[-length - 1 :].long()
            logits = model(window[None, :-1])[0, -14:].log_softmax(-1)
            losses[number] += (-logits.gather(1, window[-14:, None])).tolist()
        expected = [sum(x[0] for x in file) / len(file) for file in losses.values()]
        assert found["nats"][str(length)] == pytest.approx(expected, rel=1e-5)
    embedding, norms, matrices, constants = 256 * 16, 3 * 2 * 16, 12 * 16**2, 9 * 16
    assert found["parameters"] == embedding + norms + matrices + constants
    gradient = found["gradient"]
    assert gradient["tokens"] == list(range(1, 33))
    assert gradient["share"] == sorted(gradient["share"])
    assert gradient["share"][-1] == pytest.approx(1)
    assert [len(fields) for fields in gradient["receptive_fields"].values()] == [TINY.gradients]
    assert [len(heads) for heads in found["attention_mass"].values()] == [TINY.heads]
    (fields,) = found["theory"]["fields"].values()
    assert fields == biases.ALiBi(2).receptive_field(0.01).tolist()
    # The mean of the heads' fields, as in the command theory.
    weights = biases.ALiBi(2).curve(torch.arange(32).double()).exp()
    fields = [normalized_receptive_field(head, 101)[0] for head in weights]
    assert found["theory"]["tokens"] == (16 * (fields[0] + fields[1])).tolist()
    model = runner.new_model(SETTINGS, "inverse_distance", 0)
    assert [*evaluation.evaluate(SETTINGS, chosen, model)["theory"]["fields"].values()] == [
        [None, None]
    ]


def test_the_same_tokens_are_predicted_at_every_length_with_their_whole_context(text):
    """Whatever the length, targets are the last tokens of the blocks, and contexts reach back from
    them by the length."""
    chosen = runner.blocks_of(SETTINGS, text)
    seen = {}
    for length in SETTINGS.eval_lengths:
        calls = []

        class Recorder(torch.nn.Module):
            def forward(self, tokens, calls=calls):
                calls.append(tokens)
                return torch.nn.functional.one_hot(tokens, settings.BYTES).float()

        segment_losses(Recorder(), chosen.segments, length, SETTINGS.scored)
        seen[length] = torch.cat(calls)
    assert torch.equal(seen[16], seen[32][:, 16:])
    assert torch.equal(seen[32], chosen.segments[:, :-1].long())


def test_batches_depend_only_on_seed_and_step(text):
    first, targets = runner.batch(SETTINGS, 0, text.train, 5)
    torch.rand(7)
    assert torch.equal(first, runner.batch(SETTINGS, 0, text.train, 5)[0])
    assert not torch.equal(first, runner.batch(SETTINGS, 0, text.train, 6)[0])
    assert not torch.equal(first, runner.batch(SETTINGS, 1, text.train, 5)[0])
    windows = text.train.long().unfold(0, 17, 1)
    for sequence in torch.cat([first, targets[:, -1:]], 1):
        assert (windows == sequence).all(1).any()
    assert torch.equal(first[:, 1:], targets[:, :-1])


def test_large_size_is_that_of_the_papers():
    """GPT-tiny of Veisi et al. (2025) has 44 million parameters with 50304 tokens."""
    size = experiment.SIZES["large"]
    with torch.device("meta"):
        model = CausalLM(50304, size.dim, size.layers, size.heads, "none")
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(44e6, rel=0.02)
    these = experiment.Settings(("none",), 512, (512,), size)
    assert these.trained_tokens == pytest.approx(1e8, rel=0.001)


@pytest.mark.parametrize("scheme", ["alibi(shift=3)", "sandwich(first_frequency=0, dbar=64)"])
def test_schemes_with_arguments_are_trained(scheme, text, tmp_path):
    results = experiment.run(replace(SETTINGS, schemes=(scheme,)), text, tmp_path)
    assert results[scheme][0]["nats"].keys() == {"16", "32"}
    (fields,) = results[scheme][0]["theory"]["fields"].values()
    expected = formula_of(scheme, TINY.heads).bias.receptive_field(0.01).tolist()
    assert fields == [field if math.isfinite(field) else None for field in expected]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schemes": ("rope",)}, "positions is 'rope'"),
        ({"schemes": ()}, r"schemes is \(\); it must name one or more"),
        ({"schemes": ("none", "none()")}, r"schemes is .*; it must name one or more, each once"),
        ({"seeds": ()}, r"seeds is \(\); it must have one or more, each once"),
        ({"train_length": 0}, "train_length is 0; it must be positive"),
        ({"eval_lengths": (2, 16)}, r"eval_lengths is \(2, 16\); the shortest may be 3"),
        ({"eval_lengths": (32, 16)}, r"eval_lengths is \(32, 16\); it must ascend"),
        ({"dtype": "float16"}, "dtype is 'float16'; it may be bfloat16 or float32"),
        ({"train_length": 1000}, "text has 1000 bytes for training; it needs over 1000"),
        ({"eval_lengths": (16, 1000)}, "text has 1000 bytes in its longest file for"),
        ({"device": "abacus"}, "device is 'abacus', which cannot be used"),
    ],
)
def test_invalid_arguments_are_refused(change, message, text, tmp_path):
    with pytest.raises(ValueError, match="^" + message):
        experiment.run(replace(SETTINGS, **change), text, tmp_path)


def test_values_of_arguments_are_checked_before_any_training():
    with pytest.raises(ValueError, match=r"^dbar must be even, not 7"):
        replace(SETTINGS, schemes=("alibi", "sandwich(dbar=7)"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--eval-lengths", "64..32"], "64..32 must be like 128..2048"),
        (["--eval-lengths", "9,8"], "9,8 must be like"),
        (["--eval-lengths", "x"], "x must be like"),
        (["--eval-lengths", "0..8"], "0..8 must be like"),
        (["--device", "abacus"], "device is 'abacus', which cannot be used"),
        (["--biases", "alibi,rope"], "positions is 'rope'; it may be none"),
        (["--biases", "alibi(shift='far')"], "shift must be a number"),
        (["--text", "nowhere"], "nowhere"),
    ],
)
def test_invalid_options_are_refused(options, message, tmp_path):
    invoked = CliRunner().invoke(main, [*COMMAND, "--output", str(tmp_path), *options])
    assert invoked.exit_code != 0
    assert message in invoked.output
