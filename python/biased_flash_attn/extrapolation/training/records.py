"""The settings and results of an experiment as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar

import torch

from ..tables import as_json
from .checkpoints import write_atomically
from .results import Results
from .settings import versions

Chosen = TypeVar("Chosen")


def write_record(path: Path, settings: object, results: Results, **others: object) -> None:
    record = {
        "settings": asdict(settings),
        **others,
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "results": results,
    }
    write_atomically(path, as_json(record).encode())


def read_record(
    path: Path, settings: type[Chosen], size: type
) -> tuple[Chosen, Results, dict[str, object]]:
    """Settings and results, and the whole record.

    Args:
        settings: their class.
        size: the class of their field `size`.
    """
    record = json.loads(path.read_text())
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in record["settings"].items()}
    values["size"] = size(**values["size"])
    results = {
        scheme: {int(seed): model for seed, model in models.items()}
        for scheme, models in record["results"].items()
    }
    return settings(**values), results, record
