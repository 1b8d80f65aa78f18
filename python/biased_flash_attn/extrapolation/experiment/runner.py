"""Runs an experiment."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from ...nn import CausalLM
from ..training import remembered, train
from ..training.loop import generator
from .evaluation import evaluate
from .settings import BYTES, Settings, identity
from .text import Text


def run(settings: Settings, text: Text, folder: Path) -> dict[str, dict[str, object]]:
    """Trains and evaluates a model for each scheme; returns the results by scheme.

    The folder contains checkpoints/SCHEME.pt and measured/SCHEME.json. Existing results of the same
    experiment are reused.

    Raises ValueError for a text that is too short, and CheckpointError for a file in the folder
    that is damaged or belongs to another experiment.
    """
    check_text(settings, text)
    return {scheme: _measured(settings, scheme, text, folder) for scheme in settings.schemes}


def check_text(settings: Settings, text: Text) -> None:
    longest = settings.eval_lengths[-1]
    if len(text.train) <= settings.train_length:
        raise ValueError(
            f"text has {len(text.train)} bytes for training; it needs over {settings.train_length}"
        )
    if len(text.test) <= longest:
        raise ValueError(f"text has {len(text.test)} bytes for testing; it needs over {longest}")


def _measured(settings: Settings, scheme: str, text: Text, folder: Path) -> dict[str, object]:
    name = re.sub("[:/]", ".", scheme)
    wanted = identity(settings, scheme, text.digest)

    def measure() -> dict[str, object]:
        checkpoint = folder / "checkpoints" / f"{name}.pt"
        model, history = trained(settings, scheme, text.train, checkpoint, wanted)
        measured = {"losses": history["losses"], "seconds": {"training": history["seconds"]}}
        return measured | evaluate(settings, model, text.test)

    return remembered(folder / "measured" / f"{name}.json", wanted, measure)


def trained(
    settings: Settings, scheme: str, text: Tensor, path: Path, identity: dict[str, object]
) -> tuple[CausalLM, dict[str, object]]:
    """The trained model, and its history as that of `train`."""
    model = new_model(settings, scheme)
    size = settings.size
    history = train(
        model,
        lambda step: batch(settings, text, step),
        path,
        identity,
        steps=size.steps,
        rate=size.rate,
        autocast=settings.autocast(),
        name=scheme,
    )
    return model, history


def new_model(settings: Settings, scheme: str) -> CausalLM:
    """The model before training, which depends only on the settings."""
    size = settings.size
    backend = "triton" if settings.device.startswith("cuda") else None
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        model = CausalLM(
            BYTES,
            size.dim,
            size.layers,
            size.heads,
            scheme,
            max_length=settings.train_length,
            backend=backend,
        )
    return model.to(settings.device)


def batch(settings: Settings, text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """The tokens and targets of a step, (batch, train_length): they depend on seed and step."""
    length = settings.train_length + 1
    starts = torch.randint(
        len(text) - length + 1, (settings.size.batch, 1), generator=generator(settings.seed, step)
    )
    tokens = text[starts + torch.arange(length)].to(settings.device).long()
    return tokens[:, :-1], tokens[:, 1:]
