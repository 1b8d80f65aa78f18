"""Runs an experiment."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..training import History, Measured, Results, measured, of_all, train
from ..training.loop import generator
from ..training.settings import check_device
from .blocks import Blocks, choose
from .evaluation import evaluate
from .settings import Settings, identity
from .text import Text


def run(settings: Settings, text: Text, folder: Path) -> Results:
    """Trains and evaluates a model for each scheme and seed; returns the results of both.

    The folder contains checkpoints/SCHEME-SEED.pt and measured/SCHEME-SEED.json. Existing results
    of the same experiment are reused, so that several processes may compute parts of it.

    Raises ValueError for a text that is too short or a device that cannot be used, and
    CheckpointError for a file in the folder that is damaged or belongs to another experiment.
    """
    check_device(settings.device)
    check_text(settings, text)
    blocks = blocks_of(settings, text)

    def measure(scheme: str, seed: int) -> Measured:
        wanted = identity(settings, scheme, seed, text.digest)
        training = partial(trained, settings, scheme, seed, text.train, identity=wanted)
        return measured(folder, wanted, training, partial(evaluate, settings, blocks))

    return of_all(settings.schemes, settings.seeds, measure)


def check_text(settings: Settings, text: Text) -> None:
    """Raises ValueError for a text that is too short."""
    longest, unit = settings.eval_lengths[-1], settings.size.unit
    if len(text.train) <= settings.train_length:
        raise ValueError(
            f"text has {len(text.train)} {unit} for training; it needs over {settings.train_length}"
        )
    most = max(map(len, text.test), default=0)
    if most <= longest:
        raise ValueError(
            f"text has {most} {unit} in its longest file for testing, one of ten; it needs over"
            f" {longest}"
        )


def blocks_of(settings: Settings, text: Text) -> Blocks:
    """The tokens whose predictions are evaluated, and their context."""
    return choose(text.test, settings.eval_lengths[-1], settings.scored, settings.size.blocks)


def trained(
    settings: Settings,
    scheme: str,
    seed: int,
    text: Tensor,
    path: Path,
    identity: dict[str, object],
) -> tuple[nn.Module, History]:
    """The trained model, and its history as that of `train`."""
    model = new_model(settings, scheme, seed)
    size = settings.size
    history = train(
        model,
        lambda step: batch(settings, seed, text, step),
        path,
        identity,
        steps=size.steps,
        rate=size.rate,
        autocast=settings.autocast(),
        name=f"{scheme}, seed {seed}",
    )
    return model, history


def new_model(settings: Settings, scheme: str, seed: int) -> nn.Module:
    """The model before training."""
    size = settings.size
    backend = "triton" if settings.device.startswith("cuda") else None
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = settings.prediction.model(
            size.vocabulary + settings.prediction.own_tokens,
            size.dim,
            size.layers,
            size.heads,
            scheme,
            max_length=settings.train_length,
            backend=backend,
        )
    return model.to(settings.device)


def batch(settings: Settings, seed: int, text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The tokens and targets of a step, (batch, train_length): they depend on seed and step."""
    length = settings.train_length + 1
    random = generator(seed, step)
    starts = torch.randint(len(text) - length + 1, (settings.size.batch, 1), generator=random)
    segments = text[starts + torch.arange(length)]
    tokens, targets = settings.prediction.examples(segments, settings.size.vocabulary, random)
    return tokens.to(settings.device), targets.to(settings.device)
