"""Trains and evaluates models on a synthetic task."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import torch

from ...nn import CausalLM
from ..modules import evaluating
from ..training import remembered, train
from ..training.loop import LOSSES, generator
from .settings import TASKS, Settings
from .tasks import Window

BATCH_TOKENS = 2**13  # per call of the model, or one document if it is longer
Measured = dict[str, object]  # of one model
Models = dict[int, Measured]  # by seed
Results = dict[str, Models]  # by scheme


def run(settings: Settings, folder: Path) -> Results:
    """Trains and evaluates a model for each scheme and seed; returns the results of both.

    The folder contains TASK/checkpoints/SCHEME-SEED.pt and TASK/measured/SCHEME-SEED.json. Existing
    results of the same experiment are reused, so that several processes may compute parts of it.

    Raises CheckpointError for a file that is damaged or belongs to another experiment.
    """
    results: Results = {scheme: {} for scheme in settings.schemes}
    for seed in settings.seeds:
        for scheme in settings.schemes:
            results[scheme][seed] = _measured(settings, scheme, seed, folder / settings.task)
    return results


def _measured(settings: Settings, scheme: str, seed: int, folder: Path) -> Measured:
    name = f"{re.sub('[:/]', '.', scheme)}-{seed}"
    identity = settings.identity(scheme, seed)
    size = settings.size

    def measure() -> Measured:
        model = new_model(settings, scheme, seed)
        history = train(
            model,
            lambda step: batch(settings, seed, step),
            folder / "checkpoints" / f"{name}.pt",
            identity,
            steps=size.steps,
            rate=size.rate,
            autocast=nullcontext(),
            name=f"{scheme}, seed {seed}",
        )
        losses = torch.tensor(history["losses"]).chunk(LOSSES)
        return {
            "losses": [part.mean().item() for part in losses],
            "seconds": history["seconds"],
            **evaluate(settings, model, seed),
        }

    return remembered(folder / "measured" / f"{name}.json", identity, measure)


def new_model(settings: Settings, scheme: str, seed: int) -> CausalLM:
    """The model before training."""
    size, vocabulary = settings.size, TASKS[settings.task].vocabulary
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CausalLM(
            vocabulary, size.dim, size.layers, size.heads, scheme, max_length=settings.train_length
        )
    return model.to(settings.device)


def batch(settings: Settings, seed: int, step: int):
    """The tokens and targets of a step."""
    task, size = TASKS[settings.task], settings.size
    drawn = task.batch(size.batch, settings.train_length, generator(seed, step))
    return [tensor.to(settings.device) for tensor in drawn]


@torch.no_grad()
def evaluate(settings: Settings, model: CausalLM, seed: int) -> Measured:
    """Expected losses of the model and of the optimum in nats, and the fraction of predictions
    whose most likely token is that of the truth, by length."""
    task, size = TASKS[settings.task], settings.size
    # Of the first step that training does not have.
    source = generator(seed, size.steps)
    documents = task.documents(size.documents, settings.eval_lengths, source)
    found: dict[str, dict[str, float]] = {"model": {}, "optimum": {}, "correct": {}}
    for length in settings.eval_lengths:
        if model.max_length is not None and length > model.max_length:
            break
        window = documents.window(length)
        logs = log_probabilities(model, window)
        most_likely = logs.argmax(-1) == window.truth.argmax(-1)
        found["model"][str(length)] = cross_entropy(window.truth, logs)
        found["optimum"][str(length)] = cross_entropy(window.truth, window.optimum.log())
        found["correct"][str(length)] = most_likely.double().mean().item()
    return found


def log_probabilities(model: CausalLM, window: Window) -> torch.Tensor:
    """The model's predictions after the last tokens of a window, (B, K, V) float64."""
    scored, parts = window.truth.shape[1], []
    with evaluating(model) as device:
        for tokens in window.tokens.split(max(1, BATCH_TOKENS // window.tokens.shape[1])):
            parts.append(model(tokens.to(device))[:, -scored:].double().cpu())
    return torch.cat(parts).log_softmax(-1)


def cross_entropy(truth: torch.Tensor, logs: torch.Tensor) -> float:
    """The expected loss, the mean of all predictions; what cannot happen does not count."""
    return 0 - torch.where(truth > 0, truth * logs, 0).sum(-1).mean().item()  # without -0.0
