"""The results of an experiment: tables like those of the papers, and all numbers as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import torch

from ..formulas import fields, initial_formula, prediction
from ..tables import as_json, table
from ..training.checkpoints import write_atomically
from ..training.settings import versions
from .counts import ORDER, perplexity_of_counts
from .evaluation import PROTOCOLS
from .settings import Settings
from .text import Text

Results = dict[str, dict[str, object]]  # by scheme

TITLES = {
    "sliding": "Sliding windows: tokens have all but half a training length of the context",
    "last_token": "The last token of each segment, with varied context",
    "nonoverlapping": "Windows that do not overlap",
}


def write_report(settings: Settings, results: Results, text: Text, folder: Path) -> list[Path]:
    """Writes table.md and results.json; returns their paths."""
    paths = [folder / "table.md", folder / "results.json"]
    counts = perplexity_of_counts(
        text.train[: settings.trained_bytes], text.test[: settings.size.stream + 1]
    )
    write_atomically(paths[0], markdown(settings, results, counts).encode())
    record = {
        "settings": asdict(settings),
        "text": text.digest,
        "perplexity of counts": counts,
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "results": results,
    }
    write_atomically(paths[1], as_json(record).encode())
    return paths


def markdown(settings: Settings, results: Results, counts: float) -> str:
    """Perplexities by length (rows) and position scheme (columns), and receptive fields.

    counts: the perplexity of the model of counts.
    """
    size = settings.size
    parts = [
        f"Trained at {settings.train_length} bytes for {size.steps} steps of {size.batch}; "
        f"{size.layers} layers of {size.dim} channels and {size.heads} heads, {settings.dtype}, "
        f"seed {settings.seed}. Perplexity of bytes; that of counts of {ORDER} bytes of context, "
        f"from as many bytes of training, {settings.trained_bytes}, is {counts:.4g}.",
    ]
    for protocol in PROTOCOLS:
        parts.append(f"{TITLES[protocol]}:\n\n{perplexities(settings, results, protocol)}")
    parts.append(
        "Receptive fields in bytes, from that of the narrowest to that of the widest head."
        f" Predicted is the fraction of the information at {settings.eval_lengths[-1]} bytes from"
        f" beyond {settings.train_length}. Untrained formulas have initial values of their own:\n\n"
        f"{receptive_fields(settings, results)}"
    )
    return "\n\n".join(parts) + "\n"


def perplexities(settings: Settings, results: Results, protocol: str) -> str:
    """The table of one protocol, with a dash for lengths without learned positions."""
    rows = [["context", *results]]
    for length in settings.eval_lengths:
        found = [r["perplexity"][protocol].get(str(length)) for r in results.values()]
        rows.append([str(length), *("-" if x is None else f"{x['perplexity']:.4g}" for x in found)])
    return table(rows)


def receptive_fields(settings: Settings, results: Results) -> str:
    """Receptive fields of gradients, attention weights and series, and predictions."""
    found = list(results.values())
    size, lengths = settings.size, (settings.train_length, settings.eval_lengths[-1])
    formulas = [initial_formula(scheme, size.heads, settings.seed) for scheme in results]
    predictions = [prediction(formula, size.layers, *lengths) for formula in formulas]
    rows = [
        ["gradient: ERF", *map(_of_gradient, found)],
        ["weights: n_emp(0.01)", *(_range(_heads(r.get("attention_mass"))) for r in found)],
        ["series, trained: TRF(0.01)", *(_range(_heads(r["theory"].get("fields"))) for r in found)],
        ["series, untrained: TRF(0.01)", *(_range(f and fields(f)) for f in formulas)],
        ["predicted before training", *("-" if x is None else f"{x:.3f}" for x in predictions)],
    ]
    return table([["receptive field", *results], *rows])


def _of_gradient(result: dict[str, object]) -> str:
    return f"{result['gradient']['receptive_field']:.0f}" if "gradient" in result else "-"


def _heads(layers: dict[str, list[float | None]] | None) -> list[float] | None:
    """The values of the heads of all layers, in which None is infinite."""
    if not layers:
        return None
    return [math.inf if head is None else head for layer in layers.values() for head in layer]


def _range(heads: list[float] | None) -> str:
    if heads is None:
        return "-"
    first, last = ("infinite" if math.isinf(x) else f"{x:.0f}" for x in (min(heads), max(heads)))
    return first if first == last else f"{first} to {last}"
