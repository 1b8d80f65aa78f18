"""The loop of training, which resumes from its last checkpoint if there is one."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from ...nn import BiasedAttention
from . import checkpoints

SECONDS_BETWEEN_CHECKPOINTS = 30
IGNORED = -100  # a target that is not scored, as in F.cross_entropy
WARMUP = 0.1  # fraction of the steps

Batches = Callable[[int], tuple[Tensor, Tensor]]
History = dict[str, object]


def train(
    model: nn.Module,
    batches: Batches,
    path: Path,
    identity: dict[str, object],
    *,
    steps: int,
    rate: float,
    autocast: AbstractContextManager,
    name: str,
) -> History:
    """Trains a model; returns its history: the loss of each step in nats, and the time.

    The state is saved at `path` every half minute and on SIGINT or SIGTERM, after which
    KeyboardInterrupt is raised at the end of the step. Interruptions do not change the result.

    Args:
        model: a new model, or one whose state at `path` replaces what it holds.
        batches: from the number of a step to its tokens and targets, (batch, N) int64 each, on the
            model's device. Targets of IGNORED do not count.
        path: of the checkpoint.
        identity: describes everything that the result depends on.
        steps: the learning rate rises to `rate` and decays to a tenth of it.
        autocast: the context of forward passes.
        name: of the progress bar.

    Raises CheckpointError for a checkpoint that is damaged or belongs to another experiment.
    """
    optimizer = torch.optim.AdamW(parameter_groups(model), betas=(0.9, 0.98), weight_decay=0.01)
    state = checkpoints.load(path, identity, str(next(model.parameters()).device))
    losses, seconds = [], 0.0
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        losses, seconds = state["losses"], state["seconds"]

    def save() -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoints.save(path, identity, {**state, "losses": losses, "seconds": seconds})

    saved = before = time.monotonic()
    with (
        stop_requests() as stopped,
        tqdm(total=steps, initial=len(losses), desc=name, leave=False) as bar,
    ):
        while len(losses) < steps:
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule(len(losses), steps)
            losses.append(_step(model, optimizer, *batches(len(losses)), autocast))
            now = time.monotonic()
            seconds, before = seconds + now - before, now
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
            if stopped or len(losses) == steps or now - saved > SECONDS_BETWEEN_CHECKPOINTS:
                save()
                saved = now
            if stopped:
                raise KeyboardInterrupt
    return {"losses": losses, "seconds": seconds}


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """The parameters for the optimizer, those of biases without weight decay.

    Decay would change the formulas that are compared: it shortens the range of some biases, and
    lengthens that of others.
    """
    layers = [m for m in model.modules() if isinstance(m, BiasedAttention) and m.bias is not None]
    biases = {parameter for layer in layers for parameter in layer.bias.parameters()}
    own = [parameter for parameter in model.parameters() if parameter in biases]
    others = [parameter for parameter in model.parameters() if parameter not in biases]
    return [{"params": others}, {"params": own, "weight_decay": 0.0}]


def _step(model, optimizer, tokens: Tensor, targets: Tensor, autocast) -> float:
    """One step of training; returns its loss."""
    with autocast:
        logits = model(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def generator(seed: int, step: int) -> torch.Generator:
    """The source of a step's random numbers, which depend only on seed and step."""
    # Generators use 32 bits of a seed; the prime separates the steps of nearby seeds.
    return torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**32)


def schedule(step: int, steps: int) -> float:
    """The learning rate as a fraction of its peak: linear warmup, then a cosine down to 0.1."""
    rise = max(1, round(WARMUP * steps))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """A list that is empty until SIGINT or SIGTERM; a second signal stops immediately."""
    requests: list[int] = []
    handlers: dict[int, object] = {}

    def note(number: int, frame) -> None:
        requests.append(number)
        signal.signal(number, handlers[number])

    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, note)
    try:
        yield requests
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
