"""Results of models, which are computed once and kept as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from .checkpoints import CheckpointError, check_identity, write_atomically
from .loop import History

LOSSES = 20  # that are kept of training, each the mean of as many steps

Measured = dict[str, object]  # of one model
Models = dict[int, Measured]  # by seed
Results = dict[str, Models]  # by scheme


def of_all(
    schemes: Sequence[str], seeds: Sequence[int], measure: Callable[[str, int], Measured]
) -> Results:
    """The results of measure(scheme, seed), all schemes of one seed before the next one."""
    results: Results = {scheme: {} for scheme in schemes}
    pairs = [(scheme, seed) for seed in seeds for scheme in schemes]
    for scheme, seed in tqdm(pairs, desc="models", leave=False):
        results[scheme][seed] = measure(scheme, seed)
    return results


def minutes(results: Results) -> float:
    """How long training took, summed over all models."""
    return sum(model["seconds"] for models in results.values() for model in models.values()) / 60


def measured(
    folder: Path,
    identity: dict[str, object],
    train: Callable[[Path], tuple[nn.Module, History]],
    evaluate: Callable[[nn.Module], Measured],
) -> Measured:
    """The results of evaluate(model), with losses and time of its training.

    The model is that of train(path of its checkpoint). Results that were saved before are read.

    Args:
        folder: of checkpoints/SCHEME-SEED.pt and measured/SCHEME-SEED.json.
        identity: describes everything that the results depend on, among which scheme and seed.

    Raises CheckpointError for a file that is damaged or belongs to another experiment.
    """
    name = f"{re.sub('[:/]', '.', identity['scheme'])}-{identity['seed']}"
    path = folder / "measured" / f"{name}.json"
    if path.exists():
        return _read(path, identity)
    model, history = train(folder / "checkpoints" / f"{name}.pt")
    losses = torch.tensor(history["losses"]).chunk(LOSSES)
    found = {
        "losses": [part.mean().item() for part in losses],
        "seconds": history["seconds"],
        **evaluate(model),
    }
    write_atomically(path, json.dumps({"identity": identity, "measured": found}, indent=1).encode())
    return found


def _read(path: Path, wanted: dict[str, object]) -> Measured:
    try:
        saved = json.loads(path.read_text())
        identity, found = saved["identity"], saved["measured"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged; remove it to start again") from error
    check_identity(path, identity, wanted)
    return found
