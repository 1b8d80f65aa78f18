"""Receptive fields of trained models, beside those of their formulas."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial

import torch

from .. import published
from ..agreement import rank_correlation
from ..experiment import Settings, Size
from ..experiment.evaluation import ATTENDING, EPS
from ..experiment.report import field_of_gradient, inputs_of_blocks, with_error
from ..intervals import extremes
from ..tables import shown, table
from ..training import Measured, Results
from .preset import Preset, training

STEPS = 1000
LAYERS, TRAIN_LENGTH = 6, 512  # of the paper's models
MODELS = ("Qin et al., 2023", "4", "WikiText-103")  # paper, table, and text

Value = Callable[[Measured], float]


class FieldFigure(Preset):
    """Figure 6 of Qin et al. (2023): empirical receptive fields of trained models."""

    def experiments(self, seeds, steps=None):
        # Lengths and biases are not scaled, so that fields are in the order of the paper.
        size = Size(LAYERS, 64, 4, steps or STEPS, 8, 2e-3, blocks=256, gradients=64, scored=4)
        rows = [r for r in published.rows() if (r.paper, r.table, r.dataset) == MODELS]
        schemes = tuple(r.scheme for r in rows if r.scheme != "sinusoidal")
        return [Settings(schemes, TRAIN_LENGTH, (TRAIN_LENGTH,), size, seeds)]

    def beside(self, settings, results, reference):
        first, *_, last = inputs_of_blocks(settings.size.layers)
        of_heads: dict[str, Value] = {"TRF, series": theoretical, "n_emp, attention": attended}
        layers = {"gradient, last block": last, "gradient, all blocks": first}
        rows = [["scheme", *of_heads, *layers]]
        for scheme, models in results.items():
            of_seeds = ([value(model) for model in models.values()] for value in of_heads.values())
            gradients = (field_of_gradient(models, layer) for layer in layers.values())
            cells = (
                *(shown(extremes(values), 0) for values in of_seeds),
                *map(with_error, gradients),
            )
            rows.append([scheme, *cells])
        compared = {
            "n_emp, attention": attended,
            **{name: partial(of_gradient, layer) for name, layer in layers.items()},
        }
        agreement = [
            f"{name} {shown(extremes(correlations(results, value)), 2)}"
            for name, value in compared.items()
        ]
        seeds = " Brackets are the least and the largest of the seeds." * (len(settings.seeds) > 1)
        return (
            f"Qin et al., 2023, figure 6, {MODELS[2]}: {LAYERS} layers, trained at {TRAIN_LENGTH}"
            " tokens. It has no numbers; according to the paper, the trend of empirical receptive"
            " fields matches that of theoretical ones (TRF), and both are smaller for Type 2 than"
            f" for Type 1. {training(settings, results, reference)} Lengths and formulas are those"
            " of the paper, the number of heads is not."
            f" All fields hold {1 - EPS:.0%}, at {TRAIN_LENGTH} bytes: the TRF of the series of"
            " exp(b) of the trained biases up to this length; the paper's empirical n_emp of"
            " attention weights, of queries in the second half of"
            f" {ATTENDING // TRAIN_LENGTH} sequences; and, for comparison, the fields of"
            " Chi et al. (2023), of the gradient of the last prediction in"
            f" {settings.size.gradients} sequences, with standard errors over these. The"
            f" first two are means over heads and layers.{seeds}"
            f"\n\n{table(rows)}\n\nRank correlation"
            f" with the TRF, of {len(results)} schemes: {'; '.join(agreement)}."
        )


def theoretical(model: Measured) -> float:
    """The mean field of the trained biases within the length."""
    curve = model["theory"]
    fields = zip(curve["eps"], curve["tokens"], strict=True)
    return next(tokens for eps, tokens in fields if math.isclose(eps, EPS, rel_tol=1e-6))


def attended(model: Measured) -> float:
    """The mean field of the attention weights of heads and layers."""
    heads = [field for layer in model["attention_mass"].values() for field in layer]
    return statistics.fmean(heads)


def of_gradient(layer: str, model: Measured) -> float:
    """The mean field of the gradient at the output of a layer."""
    return statistics.fmean(model["gradient"]["receptive_fields"][layer])


def correlations(results: Results, value: Value) -> list[float]:
    """The rank correlation of a value with the theoretical field over schemes, for each seed."""
    found = []
    for models in zip(*(of_seeds.values() for of_seeds in results.values()), strict=True):
        x, y = (torch.tensor([f(model) for model in models]) for f in (theoretical, value))
        found.append(rank_correlation(x, y))
    return found
