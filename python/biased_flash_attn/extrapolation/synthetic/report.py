"""The results of a synthetic task as tables, with Student intervals over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from ..formulas import initial_formula, prediction
from ..intervals import POWER, detectable, student
from ..tables import COVERAGE, Interval, as_json, shown, table
from ..training.checkpoints import write_atomically
from ..training.settings import versions
from .runner import Measured, Models, Results
from .settings import TASKS, Settings

SEEDS = (3, 5, 10, 20)  # of experiments that could follow a pilot


def write_report(settings: Settings, results: Results, folder: Path) -> list[Path]:
    """Writes TASK.md and TASK.json; returns their paths."""
    paths = [folder / f"{settings.task}.md", folder / f"{settings.task}.json"]
    write_atomically(paths[0], markdown(settings, results).encode())
    record = {
        "settings": asdict(settings),
        "versions": versions(),
        "threads": torch.get_num_threads(),
        "results": results,
    }
    write_atomically(paths[1], as_json(record).encode())
    return paths


def markdown(settings: Settings, results: Results) -> str:
    size, minutes = settings.size, total_seconds(results) / 60
    parts = [
        f"Task {settings.task}: {size.layers} layers of {size.dim} channels and {size.heads} heads,"
        f" trained on {size.steps} batches of {size.batch} documents of {settings.train_length}"
        f" tokens, and evaluated on {size.documents} documents. Seeds"
        f" {', '.join(map(str, settings.seeds))}; brackets are {COVERAGE:.0%} Student intervals of"
        f" the mean over them. Training took {minutes:.0f} minutes."
    ]
    parts.append(f"Cross entropy in nats, by context:\n\n{losses(settings, results)}")
    if TASKS[settings.task].has_gain:
        parts.append(f"{SHARES}\n\n{shares(settings, results)}")
        parts.append(f"{SUMMARY}\n\n{summary(settings, results)}")
        if len(settings.seeds) > 1:
            parts.append(comparison(settings, results))
    else:
        parts.append(
            "Fraction of predictions whose most likely token is the right one:\n\n"
            f"{accuracies(settings, results)}"
        )
    return "\n\n".join(parts) + "\n"


SHARES = (
    "Share of the gain that is used: the decrease of the cross entropy from the training length on,"
    " divided by that of the optimum. A model that does not use what is farther away has 0, and one"
    " that loses by it less:"
)
SUMMARY = (
    "Excess over the optimum in nats, and what `predict` says before training: the fraction of the"
    " information at the longest context from beyond the training length:"
)


def losses(settings: Settings, results: Results) -> str:
    """Means over seeds; those of the optimum are the same for all schemes."""
    rows = [["scheme", *map(str, settings.eval_lengths)]]
    optimum = ("optimum", next(iter(results.values())), "optimum")
    for name, models, kind in (optimum, *((*found, "model") for found in results.items())):
        cells = []
        for length in map(str, settings.eval_lengths):
            values = [model[kind][length] for model in models.values() if length in model[kind]]
            cells.append(f"{statistics.fmean(values):.4f}" if values else "-")
        rows.append([name, *cells])
    return table(rows)


def shares(settings: Settings, results: Results) -> str:
    lengths = settings.eval_lengths[1:]
    rows = [["scheme", *map(str, lengths)]]
    for scheme, models in results.items():
        found = (over_seeds(models, partial(share, settings.train_length), n) for n in lengths)
        rows.append([scheme, *map(shown, found)])
    return table(rows)


def accuracies(settings: Settings, results: Results) -> str:
    rows = [["scheme", *map(str, settings.eval_lengths)]]
    for scheme, models in results.items():
        found = (over_seeds(models, correct, length) for length in settings.eval_lengths)
        rows.append([scheme, *map(shown, found)])
    return table(rows)


def share(train_length: int, model: Measured, length: int) -> float:
    """The share of the gain from beyond the training length that a model uses."""
    used, gain = (model[k][str(train_length)] - model[k][str(length)] for k in ("model", "optimum"))
    return used / gain


def correct(model: Measured, length: int) -> float:
    return model["correct"][str(length)]


def excess(model: Measured, length: int) -> float:
    return model["model"][str(length)] - model["optimum"][str(length)]


def summary(settings: Settings, results: Results) -> str:
    """Excess at the training length and at the longest one, and the prediction."""
    first, last = settings.train_length, settings.eval_lengths[-1]
    rows = [["scheme", f"excess at {first}", f"excess at {last}", "predicted before training"]]
    for scheme, models in results.items():
        formula = initial_formula(scheme, settings.size.heads, settings.seeds[0])
        before = prediction(formula, settings.size.layers, first, last)
        cells = [shown(over_seeds(models, excess, length), 4) for length in (first, last)]
        rows.append([scheme, *cells, "-" if before is None else f"{before:.3f}"])
    return table(rows)


def comparison(settings: Settings, results: Results) -> str:
    """Paired differences from the scheme with the largest share; of one scheme, the power of an
    experiment with more of them."""
    longest = settings.eval_lengths[-1]
    found = {
        scheme: [share(settings.train_length, model, longest) for model in models.values()]
        for scheme, models in results.items()
        if all(str(longest) in model["model"] for model in models.values())
    }
    if len(found) == 1:
        ((scheme, values),) = found.items()
        return power(statistics.stdev(values), scheme)
    best = max(found, key=lambda scheme: statistics.fmean(found[scheme]))
    rows = [["scheme", f"share of {best} - share"]]
    for scheme, values in found.items():
        if scheme != best:
            differences = [x - y for x, y in zip(found[best], values, strict=True)]
            rows.append([scheme, shown(student(differences))])
    return (
        f"Differences of the share at {longest} from that of {best}, paired by seed. Each interval"
        f" is for one comparison:\n\n{table(rows)}"
    )


def power(deviation: float, scheme: str) -> str:
    rows = [["seeds", "difference of shares"]]
    for seeds in SEEDS:
        rows.append([str(seeds), f"{detectable(2**0.5 * deviation, seeds):.3f}"])
    return (
        f"The share of {scheme} at the longest context has a standard deviation of {deviation:.4f}"
        " over seeds. If that of another scheme is the same, and independent of it, a paired t-test"
        f" of level {1 - COVERAGE:.2f} finds these differences with a probability of {POWER:.0%}:"
        f"\n\n{table(rows)}"
    )


def over_seeds(models: Models, value: Callable, length: int) -> Interval | None:
    """The interval of value(measured, length), or None for a length that models do not reach."""
    if any(str(length) not in model["model"] for model in models.values()):
        return None
    return student([value(model, length) for model in models.values()])


def total_seconds(results: Results) -> float:
    return sum(model["seconds"] for models in results.values() for model in models.values())
