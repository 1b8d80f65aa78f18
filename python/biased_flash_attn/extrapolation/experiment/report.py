"""The results of an experiment: tables like those of the papers, and all numbers as JSON.

Importing it needs SciPy, an optional dependency.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..formulas import fields, initial_formula, prediction
from ..measures import Curves, Measure, by_length
from ..tables import COVERAGE, Interval, shown, table
from ..training import Models, Results, minutes
from ..training.checkpoints import write_atomically
from ..training.records import read_record, write_record
from .blocks import mean_by_file
from .runner import blocks_of
from .settings import Settings, Size
from .text import Text
from .uncertainty import Sample, perplexity

MARGIN = 1.05  # of pictures, as a factor


@dataclass(frozen=True)
class Reference:
    """What the models of all schemes have in common.

    text: its digest.
    train: how many tokens it has for training.
    test: how many tokens its files for testing have in all.
    blocks: how many windows each file has that is evaluated.
    counts: the mean loss of the model of counts in each of these files.
    """

    text: str
    train: int
    test: int
    blocks: list[int]
    counts: list[float]

    @property
    def perplexity(self) -> float:
        """That of counts in all windows."""
        total = sum(map(operator.mul, self.blocks, self.counts))
        return math.exp(total / sum(self.blocks))

    @classmethod
    def of(cls, settings: Settings, text: Text) -> Reference:
        blocks = blocks_of(settings, text)
        train = text.train[: settings.trained_tokens]
        losses = settings.prediction.counted(
            train, blocks.segments, settings.scored, settings.size.vocabulary
        )
        _, sizes = blocks.files.unique(return_counts=True)
        return cls(
            text.digest,
            len(text.train),
            sum(map(len, text.test)),
            sizes.tolist(),
            mean_by_file(losses, blocks.files),
        )


def write_report(
    settings: Settings, results: Results, reference: Reference, folder: Path
) -> list[Path]:
    """Writes table.md and results.json; returns their paths."""
    paths = [folder / "table.md", folder / "results.json"]
    write_atomically(paths[0], markdown(settings, results, reference).encode())
    write_record(paths[1], settings, results, reference=asdict(reference))
    return paths


def read_report(path: Path) -> tuple[Settings, Results, Reference]:
    """What results.json holds."""
    settings, results, record = read_record(path, Settings, Size)
    return settings, results, Reference(**record["reference"])


def markdown(settings: Settings, results: Results, reference: Reference) -> str:
    """Perplexities by scheme (rows) and length (columns), and receptive fields."""
    unit, sample = settings.size.unit, Sample(reference.blocks)
    first, last = settings.train_length, settings.eval_lengths[-1]
    parts = [
        description(settings, results, reference),
        f"Perplexity of {unit}, by context; `counts` is a model that knows"
        f" {settings.prediction.context_of_counts(unit)}, from the same text, at most as many"
        f" {unit}:\n\n{means(settings, results, reference, sample)}",
    ]
    if has_ratios(settings):
        found = ratios(settings, results, sample)
        others = [n for n in settings.eval_lengths if n != first]
        parts.append(f"Perplexity divided by that at {first}:\n\n{by_length(found, others)}")
    parts += comparison(settings, results, sample)
    if settings.prediction.causal:
        parts.append(
            f"Receptive fields in {unit}. Those of the gradient at the input of each block are"
            " means with their standard errors over sequences, the others are from that of the"
            " narrowest to that of the widest head. Predicted is the fraction of the information"
            f" at {last} {unit} from beyond {first}. Untrained formulas have initial values of"
            f" their own:\n\n{receptive_fields(settings, results)}"
        )
    return "\n\n".join(parts) + "\n"


def description(settings: Settings, results: Results, reference: Reference) -> str:
    size, unit = settings.size, settings.size.unit
    predicted = sum(reference.blocks) * settings.prediction.predicted(settings.scored)
    seeds, cache = ", ".join(map(str, settings.seeds)), settings.cache
    kept = f", of which a sliding cache keeps {cache} keys" if cache else ""
    return (
        f"Trained at {settings.train_length} {unit} for {size.steps} steps of {size.batch}"
        f" sequences, {settings.trained_tokens} {unit} in all; {settings.prediction.models} with"
        f" {size.layers} layers of {size.dim} channels and {size.heads} heads, {settings.dtype},"
        f" seeds {seeds}. Training took {minutes(results):.0f} minutes, summed over the models. The"
        f" text has {reference.train} {unit} for training, and {reference.test} for testing. At"
        f" every context the same {predicted} {unit} of {len(reference.blocks)} file(s) are"
        f" predicted, {settings.prediction.protocol(settings.scored, unit)}{kept}."
        f"{brackets(settings, reference)}"
    )


def brackets(settings: Settings, reference: Reference) -> str:
    """What the intervals are, as a sentence after others."""
    several = {"seeds": settings.seeds, "files, by bootstrap": reference.blocks}
    over = " and over ".join(name for name, values in several.items() if len(values) > 1)
    return f" Brackets are {COVERAGE:.0%} intervals from the variance over {over}." if over else ""


def measures(settings: Settings, results: Results, reference: Reference) -> list[Measure]:
    """What is drawn of the perplexities. Those far above that of counts are beyond the limits."""
    name = f"perplexity of {settings.size.unit} (line: counts)"
    sample = Sample(reference.blocks)
    curves, counts = perplexities(settings, results, sample), reference.perplexity
    means = [[interval.mean for interval in curve.values()] for curve in curves.values() if curve]
    least, first = min(map(min, means), default=counts), [found[0] for found in means]
    limits = least / MARGIN, max([counts, *first]) * MARGIN
    found = [Measure(name, curves, logarithmic=True, limits=limits, marked=(counts,))]
    if has_ratios(settings):
        of_ratios = ratios(settings, results, sample)
        name = f"perplexity / that at {settings.train_length}"
        found.append(Measure(name, of_ratios, logarithmic=True, marked=(1,)))
    return found


def has_ratios(settings: Settings) -> bool:
    """Whether perplexity can be divided by that at the training length."""
    return settings.eval_lengths[-1] != settings.train_length in settings.eval_lengths


def means(settings: Settings, results: Results, reference: Reference, sample: Sample) -> str:
    """A table of perplexities, with a dash for lengths without learned positions."""
    rows = [["scheme", *map(str, settings.eval_lengths)]]
    rows.append(["counts", *[f"{reference.perplexity:.4g}"] * len(settings.eval_lengths)])
    for scheme, curve in perplexities(settings, results, sample).items():
        cells = (f"{curve[n].mean:.4g}" if n in curve else "-" for n in settings.eval_lengths)
        rows.append([scheme, *cells])
    return table(rows)


def perplexities(settings: Settings, results: Results, sample: Sample) -> Curves:
    """Of each scheme at the lengths that its models reach, with intervals."""
    return {
        scheme: {
            n: perplexity(sample.interval(x))
            for n in settings.eval_lengths
            if (x := nats(models, n)) is not None
        }
        for scheme, models in results.items()
    }


def ratios(settings: Settings, results: Results, sample: Sample) -> Curves:
    """Perplexity at each length divided by that at the training length, with intervals."""
    curves = {}
    for scheme, models in results.items():
        trained = nats(models, settings.train_length)
        found = {n: ratio(sample, nats(models, n), trained) for n in settings.eval_lengths}
        curves[scheme] = {n: x for n, x in found.items() if x is not None}
    return curves


def comparison(settings: Settings, results: Results, sample: Sample) -> list[str]:
    """Perplexities at the longest context, divided by those of the first scheme, paired."""
    longest = settings.eval_lengths[-1]
    found = {scheme: nats(models, longest) for scheme, models in results.items()}
    (first, reference), *others = found.items()
    if reference is None or not others:
        return []
    rows = [["scheme", f"perplexity / that of {first}"]]
    rows += [[scheme, shown(ratio(sample, values, reference))] for scheme, values in others]
    return [
        f"Perplexity at {longest} divided by that of {first}, paired by seed and file. Each"
        f" interval is for one comparison:\n\n{table(rows)}"
    ]


def ratio(sample: Sample, losses: Tensor | None, others: Tensor | None) -> Interval | None:
    """Of perplexities, or None for lengths that a model lacks."""
    if losses is None or others is None:
        return None
    return perplexity(sample.interval(losses - others))


def nats(models: Models, length: int) -> Tensor | None:
    """The mean loss of each model in each file, (seeds, files), or None for lengths without."""
    found = [model["nats"].get(str(length)) for model in models.values()]
    return None if None in found else torch.tensor(found, dtype=torch.float64)


def inputs_of_blocks(layers: int) -> list[str]:
    """The names of the layers that return what each block receives."""
    return ["embedding", *(f"blocks.{n}" for n in range(layers - 1))]


def receptive_fields(settings: Settings, results: Results) -> str:
    """Receptive fields of gradients, attention weights and series, and predictions."""
    size = settings.size
    layers = inputs_of_blocks(size.layers)
    names = [f"gradient, input of block {n}: ERF" for n in range(size.layers)]
    rows = [
        [
            "scheme",
            *names,
            "weights: n_emp(0.01)",
            "series, trained: TRF(0.01)",
            "series, untrained: TRF(0.01)",
            "predicted before training",
        ]
    ]
    for scheme, models in results.items():
        formula = initial_formula(scheme, size.heads, settings.seeds[0])
        fraction = predicted(settings, scheme)
        rows.append(
            [
                scheme,
                *(with_error(field_of_gradient(models, layer)) for layer in layers),
                _range(_heads(models, lambda m: m.get("attention_mass"))),
                _range(_heads(models, lambda m: m["theory"].get("fields"))),
                _range(formula and fields(formula)),
                "-" if fraction is None else f"{fraction:.3f}",
            ]
        )
    return table([list(row) for row in zip(*rows, strict=True)])


def predicted(settings: Settings, scheme: str) -> float | None:
    """What `predict` says of a scheme before it is trained, with the first seed, or None."""
    formula = initial_formula(scheme, settings.size.heads, settings.seeds[0])
    lengths = settings.train_length, settings.eval_lengths[-1]
    return prediction(formula, settings.size.layers, *lengths, settings.cache)


def field_of_gradient(models: Models, layer: str) -> tuple[float, float] | None:
    """The mean field of the gradient at the input of a block, over seeds and sequences, and its
    standard error over sequences, NaN for one; or None without gradients."""
    if not all("gradient" in model for model in models.values()):
        return None
    found = [model["gradient"]["receptive_fields"][layer] for model in models.values()]
    means = [statistics.fmean(values) for values in zip(*found, strict=True)]
    error = statistics.stdev(means) / len(means) ** 0.5 if len(means) > 1 else math.nan
    return statistics.fmean(means), error


def with_error(field: tuple[float, float] | None) -> str:
    """The cell of a table: a field with its standard error if there is one, or a dash."""
    if field is None:
        return "-"
    mean, error = field
    return f"{mean:.0f}" if math.isnan(error) else f"{mean:.0f} ± {error:.1f}"


def _heads(models: Models, of_layers) -> list[float] | None:
    """The values of the heads of all layers and seeds, in which None is infinite."""
    found: list[float] = []
    for model in models.values():
        for heads in (of_layers(model) or {}).values():
            found += [math.inf if head is None else head for head in heads]
    return found or None


def _range(heads: Sequence[float] | None) -> str:
    if heads is None:
        return "-"
    first, last = ("infinite" if math.isinf(x) else f"{x:.0f}" for x in (min(heads), max(heads)))
    return first if first == last else f"{first} to {last}"
