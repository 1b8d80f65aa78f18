"""Trains and evaluates models on a synthetic task."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from ...nn import CausalLM
from ..modules import evaluating
from ..perplexity import BATCH_TOKENS
from ..training import History, Measured, Results, measured, of_all, train
from ..training.loop import generator
from ..training.settings import check_device
from .settings import TASKS, Settings
from .tasks import Window


def run(settings: Settings, folder: Path) -> Results:
    """Trains and evaluates a model for each scheme and seed; returns the results of both.

    The folder contains TASK/checkpoints/SCHEME-SEED.pt and TASK/measured/SCHEME-SEED.json. Existing
    results of the same experiment are reused, so that several processes may compute parts of it.

    Raises ValueError for a device that cannot be used, and CheckpointError for a file that is
    damaged or belongs to another experiment.
    """
    check_device(settings.device)

    def measure(scheme: str, seed: int) -> Measured:
        identity = settings.identity(scheme, seed)
        training = partial(trained, settings, scheme, seed, identity=identity)
        evaluation = partial(evaluate, settings, seed)
        return measured(folder / settings.task, identity, training, evaluation)

    return of_all(settings.schemes, settings.seeds, measure)


def trained(
    settings: Settings, scheme: str, seed: int, path: Path, identity: dict[str, object]
) -> tuple[CausalLM, History]:
    """The trained model, and its history as that of `train`."""
    model, size = new_model(settings, scheme, seed), settings.size
    history = train(
        model,
        lambda step: batch(settings, seed, step),
        path,
        identity,
        steps=size.steps,
        rate=size.rate,
        autocast=nullcontext(),
        name=f"{scheme}, seed {seed}",
    )
    return model, history


def new_model(settings: Settings, scheme: str, seed: int) -> CausalLM:
    """The model before training."""
    size, vocabulary = settings.size, TASKS[settings.task].vocabulary
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = CausalLM(
            vocabulary, size.dim, size.layers, size.heads, scheme, max_length=settings.train_length
        )
    return model.to(settings.device)


def batch(settings: Settings, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """The tokens and targets of a step."""
    task, size = TASKS[settings.task], settings.size
    tokens, targets = task.batch(size.batch, settings.train_length, generator(seed, step))
    return tokens.to(settings.device), targets.to(settings.device)


@torch.no_grad()
def evaluate(settings: Settings, seed: int, model: CausalLM) -> Measured:
    """Expected losses of the model and of the optimum in nats, and the fraction of predictions
    whose most likely token is that of the truth, by length."""
    task, size = TASKS[settings.task], settings.size
    # Of the first step that training does not have.
    source = generator(seed, size.steps)
    documents = task.documents(size.documents, settings.eval_lengths, source)
    found: dict[str, dict[str, float]] = {"model": {}, "optimum": {}, "correct": {}}
    longest = model.max_length or settings.eval_lengths[-1]
    for length in tqdm(settings.eval_lengths, desc="evaluation", delay=2, leave=False):
        window = documents.window(length)
        found["optimum"][str(length)] = cross_entropy(window.truth, window.optimum.log())
        if length <= longest:
            logs = log_probabilities(model, window)
            found["model"][str(length)] = cross_entropy(window.truth, logs)
            most_likely = logs.argmax(-1) == window.truth.argmax(-1)
            found["correct"][str(length)] = most_likely.double().mean().item()
    return found


def log_probabilities(model: CausalLM, window: Window) -> Tensor:
    """The model's predictions after the last tokens of a window, (B, K, V) float64."""
    scored, parts = window.truth.shape[1], []
    with evaluating(model) as device:
        for tokens in window.tokens.split(max(1, BATCH_TOKENS // window.tokens.shape[1])):
            parts.append(model(tokens.to(device))[:, -scored:].cpu().double())
    return torch.cat(parts).log_softmax(-1)


def cross_entropy(truth: Tensor, logs: Tensor) -> float:
    """The expected loss, the mean of all predictions; what cannot happen does not count."""
    return 0 - torch.where(truth > 0, truth * logs, 0).sum(-1).mean().item()  # without -0.0
