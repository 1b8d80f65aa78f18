"""The results of an experiment: tables like those of the papers, and all numbers as JSON."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import torch

from ..formulas import Formula, fields, formula_of
from ..prediction import predict
from .checkpoints import write_atomically
from .counts import ORDER, perplexity_of_counts
from .evaluation import PROTOCOLS
from .settings import Settings, versions
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


def as_json(record: object) -> str:
    """The record as indented JSON, with each list of numbers on one line."""
    text = json.dumps(record, indent=1)
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


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
    formulas = [_formula(settings, scheme) for scheme in results]
    rows = [
        ["gradient: ERF", *map(_of_gradient, found)],
        ["weights: n_emp(0.01)", *(_range(_heads(r.get("attention_mass"))) for r in found)],
        ["series, trained: TRF(0.01)", *(_range(_heads(r["theory"].get("fields"))) for r in found)],
        ["series, untrained: TRF(0.01)", *(_range(f and fields(f)) for f in formulas)],
        ["predicted before training", *(_predicted(settings, f) for f in formulas)],
    ]
    return table([["receptive field", *results], *rows])


def _formula(settings: Settings, scheme: str) -> Formula | None:
    """The formula of a scheme before training, or None for schemes without one."""
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        try:
            return formula_of(scheme, settings.size.heads)
        except ValueError:
            return None


def _predicted(settings: Settings, formula: Formula | None) -> str:
    """The prediction, or a dash for schemes without a formula and biases that grow."""
    if formula is None:
        return "-"
    lengths = settings.train_length, settings.eval_lengths[-1]
    try:
        share = predict(formula.bias, settings.size.layers, *lengths, window=formula.window)
    except ValueError:
        return "-"
    return f"{share:.3f}"


def table(rows: list[list[str]]) -> str:
    """A Markdown table: the first row is the header, and numbers are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(cells: list[str]) -> str:
        first, *rest = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        return "| " + " | ".join([first.strip().ljust(widths[0]), *rest]) + " |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([line(rows[0]), f"|{rule}|", *map(line, rows[1:])])


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
