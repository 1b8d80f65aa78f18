"""Receptive fields of trained models, beside those of their formulas."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from .. import published
from ..agreement import rank_correlation
from ..experiment import Settings, Size
from ..experiment.report import inputs_of_blocks
from ..intervals import student
from ..tables import COVERAGE, shown, table
from ..training import Measured, Results
from .preset import SCALE, Preset, scaled, training

STEPS = 1000
LAYERS, TRAIN_LENGTH = 6, 512  # of the paper's models
MODELS = ("Qin et al., 2023", "4", "WikiText-103")  # paper, table, and text
LENGTHENED = 8  # how much longer the measured sequences are than those of training


class FieldFigure(Preset):
    """Figure 6 of Qin et al. (2023): empirical receptive fields of their schemes."""

    def experiments(self, seeds, steps=None):
        size = Size(LAYERS, 64, 4, steps or STEPS, 64, 2e-3, blocks=256, gradients=64, scored=4)
        rows = [r for r in published.rows() if (r.paper, r.table, r.dataset) == MODELS]
        schemes = tuple(scaled(r.scheme) for r in rows if r.scheme != "sinusoidal")
        train_length = TRAIN_LENGTH // SCALE
        lengths = (train_length, LENGTHENED * train_length)
        return [Settings(schemes, train_length, lengths, size, seeds)]

    def beside(self, settings, results, reference):
        first, *_, last = inputs_of_blocks(settings.size.layers)
        columns: dict[str, Callable[[Measured], float]] = {
            "TRF, a layer": theoretical,
            "ERF, the last block": lambda model: empirical(model, last),
            "ERF, all blocks": lambda model: empirical(model, first),
        }
        rows = [["scheme", *columns]]
        for scheme, models in results.items():
            of_seeds = ([value(model) for model in models.values()] for value in columns.values())
            rows.append([scheme, *(shown(student(values), 0) for values in of_seeds)])
        correlations = [
            f"{name} {shown(student(agreement(results, value)), 2)}"
            for name, value in columns.items()
            if value is not theoretical
        ]
        return (
            f"Qin et al., 2023, figure 6: {LAYERS} layers, trained at {TRAIN_LENGTH} tokens. It has"
            " no numbers; according to the paper, the trend of empirical receptive fields (ERF)"
            " matches that of theoretical ones (TRF), and both are smaller for Type 2 than for Type"
            f" 1. {training(settings)} The TRF of the trained biases holds"
            f" {1 - _eps(results):.0%} of exp(b), the mean of heads and layers, and the ERF 99 % of"
            f" the gradient, the mean of {settings.size.gradients} sequences; both at"
            f" {settings.eval_lengths[-1]} bytes, with {COVERAGE:.0%} intervals over seeds.\n\n"
            f"{table(rows)}\n\nRank correlation with the TRF, of {len(results)} schemes:"
            f" {'; '.join(correlations)}."
        )


def theoretical(model: Measured) -> float:
    """The mean field of the trained biases, of the smallest eps that is not 0."""
    return model["theory"]["tokens"][-2]


def empirical(model: Measured, layer: str) -> float:
    """The mean field of the gradient at the input of a layer."""
    return statistics.fmean(model["gradient"]["receptive_fields"][layer])


def agreement(results: Results, value: Callable[[Measured], float]) -> list[float]:
    """The rank correlation of a value with the theoretical field over schemes, for each seed."""
    seeds = next(iter(results.values()))
    found = []
    for seed in seeds:
        models = [models[seed] for models in results.values()]
        x, y = (torch.tensor([f(m) for m in models]) for f in (theoretical, value))
        found.append(rank_correlation(x, y))
    return found


def _eps(results: Results) -> float:
    models = next(iter(results.values()))
    return next(iter(models.values()))["theory"]["eps"][-2]
