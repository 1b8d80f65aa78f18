"""The results of a synthetic task as tables, with intervals over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from ..agreement import DECIMALS, rank_correlation
from ..formulas import initial_formula, prediction
from ..intervals import POWER, detectable, deviation, extremes, student
from ..measures import Curves, Measure, by_length
from ..tables import COVERAGE, Interval, shown, table
from ..training import Measured, Models, Results, minutes
from ..training.checkpoints import write_atomically
from ..training.records import read_record, write_record
from .settings import TASKS, Settings, Size

Value = Callable[[Measured, str], float]
Brackets = Callable[[Sequence[float]], Interval]
SEEDS = (3, 5, 10, 20)  # of experiments that could follow a pilot
LEAST = -1.5  # share that is drawn


def write_report(settings: Settings, results: Results, folder: Path) -> list[Path]:
    """Writes TASK.md and TASK.json; returns their paths."""
    paths = [folder / f"{settings.task}.md", folder / f"{settings.task}.json"]
    write_atomically(paths[0], markdown(settings, results).encode())
    write_record(paths[1], settings, results)
    return paths


def read_report(path: Path) -> tuple[Settings, Results]:
    """What TASK.json holds."""
    settings, results, _ = read_record(path, Settings, Size)
    return settings, results


def markdown(settings: Settings, results: Results) -> str:
    lengths = settings.eval_lengths
    parts = [
        f"Task {settings.task}: {description(settings, results)}",
        f"Cross entropy in nats, by context:\n\n{losses(settings, results)}",
        f"{EXCESS}:\n\n{summary(settings, results)}",
    ]
    if not TASKS[settings.task].optimum_improves:
        found = by_length(curves(results, lengths, correct, extremes), lengths)
        parts.append(f"Fraction of predictions whose most likely token is right:\n\n{found}")
    elif len(lengths) > 1:
        for title, value in ((REACHED, reached), (CHANGE, change)):
            of_length = partial(value, str(settings.train_length))
            found = curves(results, lengths[1:], of_length)
            parts.append(f"{title}:\n\n{by_length(found, lengths[1:])}")
            if len(settings.seeds) > 1:
                parts += comparison(results, lengths[-1], of_length)
            parts += correlation(settings, results, of_length)
    return "\n\n".join(parts) + "\n"


def description(settings: Settings, results: Results) -> str:
    size = settings.size
    return (
        f"{size.layers} layers of {size.dim} channels and {size.heads} heads,"
        f" trained on {size.steps} batches of {size.batch} documents of {settings.train_length}"
        f" tokens, and evaluated on {size.documents} documents. Seeds"
        f" {', '.join(map(str, settings.seeds))}; brackets are {BRACKETS[brackets(settings)]}."
        f" Training took {minutes(results):.0f} minutes, summed over the models."
    )


BRACKETS = {
    student: f"{COVERAGE:.0%} Student intervals of the mean over them",
    extremes: "the least and the largest value over them",
}


def brackets(settings: Settings) -> Brackets:
    """What is shown beside means. Models learn some tasks or fail, which no normal distribution
    describes."""
    return student if TASKS[settings.task].optimum_improves else extremes


def measures(settings: Settings, results: Results) -> list[Measure]:
    """What is drawn."""
    lengths = settings.eval_lengths
    of_excess = curves(results, lengths, excess, brackets(settings))
    found = [Measure("excess over the optimum (nats)", of_excess, logarithmic=True)]
    if not TASKS[settings.task].optimum_improves:
        right = curves(results, lengths, correct, extremes)
        found.append(Measure("fraction of right predictions", right, limits=(0, 1.05)))
    elif len(lengths) > 1:
        share = curves(results, lengths[1:], partial(reached, str(settings.train_length)))
        name, limits = "share of the gain that is reached", (LEAST, 1.05)
        found.append(Measure(name, share, limits=limits, marked=(0, 1)))
    return found


EXCESS = (
    "Excess over the optimum in nats, and what `predict` says before training, the fraction of the"
    " information at the longest context from beyond the training length"
)
REACHED = (
    "Share of the gain that is reached: how much lower the cross entropy is than that of the"
    " optimum at the training length, divided by the gain of the optimum from there on. The optimum"
    " has 1 and, on average over documents, no model that knows as many tokens as in training has"
    " more than 0"
)
CHANGE = (
    "Change from the training length on, divided by the same gain. A negative number is a loss. It"
    " may exceed 1, as a model may have lost more than others at the training length"
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


def curves(
    results: Results, lengths: Sequence[int], value: Value, around: Brackets = student
) -> Curves:
    """A value of each scheme at the lengths that its models reach."""
    return {
        scheme: {n: x for n in lengths if (x := over_seeds(models, value, n, around)) is not None}
        for scheme, models in results.items()
    }


def reached(train_length: str, model: Measured, length: str) -> float:
    """The share of the gain of the optimum from beyond the training length."""
    start = model["optimum"][train_length]
    return (start - model["model"][length]) / (start - model["optimum"][length])


def change(train_length: str, model: Measured, length: str) -> float:
    """How much the loss falls from the training length on, divided by how much the optimum does."""
    fall, gain = (model[kind][train_length] - model[kind][length] for kind in ("model", "optimum"))
    return fall / gain


def correct(model: Measured, length: str) -> float:
    return model["correct"][length]


def excess(model: Measured, length: str) -> float:
    return model["model"][length] - model["optimum"][length]


def summary(settings: Settings, results: Results) -> str:
    """Excess at the training length and at the longest one, and the prediction."""
    first, last = settings.train_length, settings.eval_lengths[-1]
    lengths = dict.fromkeys((first, last))
    rows = [["scheme", *(f"excess at {n}" for n in lengths), "predicted before training"]]
    before = predictions(settings, results)
    for scheme, models in results.items():
        found = (over_seeds(models, excess, n, brackets(settings)) for n in lengths)
        cells = [shown(interval, 4) for interval in found]
        rows.append([scheme, *cells, f"{before[scheme]:.3f}" if scheme in before else "-"])
    return table(rows)


def predictions(settings: Settings, results: Results) -> dict[str, float]:
    """What `predict` says of the schemes with a formula."""
    found = {}
    for scheme in results:
        formula = initial_formula(scheme, settings.size.heads, settings.seeds[0])
        lengths = settings.train_length, settings.eval_lengths[-1]
        share = prediction(formula, settings.size.layers, *lengths)
        if share is not None:
            found[scheme] = share
    return found


def correlation(settings: Settings, results: Results, value: Value) -> list[str]:
    """How well `predict` ranks the schemes by a value at the longest context."""
    longest = settings.eval_lengths[-1]
    found = [
        (round(before, DECIMALS), over_seeds(results[scheme], value, longest))
        for scheme, before in predictions(settings, results).items()
    ]
    if len(found) < 3:
        return []
    before, values = zip(*found, strict=True)
    means = torch.tensor([interval.mean for interval in values], dtype=torch.float64)
    ranks = rank_correlation(torch.tensor(before, dtype=torch.float64), means)
    return [
        f"The rank correlation of the prediction with the values at {longest} is {ranks:.2f}, of"
        f" {len(found)} schemes."
    ]


def comparison(results: Results, longest: int, value: Value) -> list[str]:
    """Paired differences of a value from that of the first scheme; of one scheme, the power of an
    experiment with more of them."""
    found = {
        scheme: [value(model, str(longest)) for model in models.values()]
        for scheme, models in results.items()
        if reaches(models, longest)
    }
    first, *_ = results
    if first not in found:
        return []
    reference = found.pop(first)
    if len(results) == 1:
        return [power(reference, first)]
    rows = [["scheme", f"difference from {first}"]]
    for scheme, values in found.items():
        differences = [x - y for x, y in zip(values, reference, strict=True)]
        rows.append([scheme, shown(student(differences))])
    return [
        f"At {longest}, minus that of {first}, paired by seed. Each interval is for one comparison:"
        f"\n\n{table(rows)}"
    ]


def power(values: Sequence[float], scheme: str) -> str:
    found = deviation(values)
    rows = [["seeds", "difference", "if the deviation is the largest of its interval"]]
    for seeds in SEEDS:
        least = (detectable(2**0.5 * x, seeds) for x in (found.mean, found.high))
        rows.append([str(seeds), *(f"{x:.3f}" for x in least)])
    return (
        f"At the longest context, the values of {scheme} have a standard deviation of"
        f" {shown(found)} over seeds. If that of another scheme is the same, and independent of it,"
        f" a paired t-test of level {1 - COVERAGE:.2f} finds these differences with a probability"
        f" of {POWER:.0%}:\n\n{table(rows)}"
    )


def over_seeds(
    models: Models, value: Value, length: int, around: Brackets = student
) -> Interval | None:
    """The mean of value(measured, length), or None for a length that models do not reach."""
    if not reaches(models, length):
        return None
    return around([value(model, str(length)) for model in models.values()])


def reaches(models: Models, length: int) -> bool:
    return all(str(length) in model["model"] for model in models.values())
