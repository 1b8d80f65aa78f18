"""Predictions from formulas against the perplexities that the papers publish."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby, product

from .formulas import Formula, fields, formula_of
from .prediction import CONTENT, HEADS, predict
from .published import Row, rows

CHOICE, HELD_OUT = "choice", "held out"
# Every second scheme in the order of the papers. ALiBi with other numbers of heads goes with
# shift 0 of Chi et al., and both Sandwiches go together.
SCHEMES_HELD_OUT = {
    "alibi(slopes='geometric')",
    "alibi(slopes='geometric', shift=4)",
    "alibi(slopes='geometric', shift=8)",
    "alibi(exponent=2)",
    "alibi(exponent=6)",
    "window(40)",
    "window(100)",
    "window(160)",
    "alibi",
    "smoothed_sandwich",
    "type2",
    "inverse_log_distance",
}


@dataclass(frozen=True)
class Comparison:
    """What was measured for one published row.

    Attributes:
        row: the published row.
        part: "choice" for the schemes on which the variant of `predict` was chosen, or "held out".
        lengths: the two lengths that are compared, the shortest from the training length on and the
            longest.
        loss: ln(perplexity at the longer / at the shorter length).
    """

    row: Row
    part: str
    lengths: tuple[int, int]
    loss: float

    @property
    def of_altered_attention(self) -> bool:
        """Whether the row is of the altered slopes and windows of Chi et al., tables 1 and 4."""
        return self.row.paper.startswith("Chi") and self.row.table in ("1", "4")


Predictor = Callable[[Formula, int, int, int], float]


@dataclass(frozen=True)
class Variant:
    """A way to call `predict`; the default is the one that was chosen."""

    heads: str = "separate"
    content: float = CONTENT
    residual: float = 0.0

    def __str__(self) -> str:
        return f"{self.heads}, content {self.content:g}, residual {self.residual:g}"

    def __call__(self, formula: Formula, layers: int, train_length: int, eval_length: int) -> float:
        options = {"heads": self.heads, "content": self.content, "residual": self.residual}
        bias, window = formula
        return predict(bias, layers, train_length, eval_length, window=window, **options)


CHOSEN = Variant()
VARIANTS = [Variant(*x) for x in product(HEADS, (0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0), (0.0, 0.5))]


def largest_field(
    formula: Formula, layers: int, train_length: int = 0, eval_length: int = 0
) -> float:
    """The keys that reach a token through all layers, in the head with the most of them.

    In each layer these are the nearest that hold 99 % of the series of exp(b), the receptive field
    of Qin et al. (2023), which does not depend on the two lengths.
    """
    return max(_through(layers, formula))


def fields_beyond(formula: Formula, layers: int, train_length: int, eval_length: int) -> float:
    """The fraction of the receptive field through all layers that training does not cover, the mean
    of the heads. It was added after all figures had been seen."""
    fractions = [max(0, 1 - train_length / keys) for keys in _through(layers, formula)]
    return sum(fractions) / len(fractions)


def _through(layers: int, formula: Formula) -> list[float]:
    return [layers * (keys - 1) + 1 for keys in fields(formula)]


# Those whose agreement is shown: the chosen variant, others that differ in one or two settings, and
# receptive fields.
SHOWN: dict[str, Predictor] = {
    f"chosen: {CHOSEN}": CHOSEN,
    "equal products: content 0": Variant(content=0.0),
    "narrowest head": Variant(heads="narrowest"),
    "mixed heads": Variant(heads="mixed"),
    "residual 0.5": Variant(residual=0.5),
    "mixed heads, content 0": Variant(heads="mixed", content=0.0),
    "receptive field, widest head": largest_field,
    "receptive field, beyond training": fields_beyond,
}


def comparisons() -> list[Comparison]:
    """The published rows whose scheme is a formula without trained parameters.

    Those with a sliding cache of keys (Chi et al., table 5) are left out.
    """
    return [
        _compared(row) for row in rows() if has_fixed_formula(row) and "cache" not in row.protocol
    ]


def has_fixed_formula(row: Row) -> bool:
    """Whether a row's scheme is a function of the distance without trained parameters."""
    try:
        bias, _ = formula_of(row.scheme, row.heads)
    except ValueError:
        return False
    return bias is None or bias.fixed


def _compared(row: Row) -> Comparison:
    first = min(length for length in row.perplexity if length >= row.train_length)
    last = max(row.perplexity)
    loss = math.log(row.perplexity[last] / row.perplexity[first])
    part = HELD_OUT if row.scheme in SCHEMES_HELD_OUT else CHOICE
    return Comparison(row, part, (first, last), loss)


def predicted(comparison: Comparison, predictor: Predictor = CHOSEN) -> float:
    """The prediction for a row, at the longest length that its table has."""
    row = comparison.row
    sizes = row.layers, row.train_length, comparison.lengths[1]
    return _predicted(row.scheme, row.heads, sizes, predictor)


@cache
def _predicted(scheme: str, heads: int, sizes: tuple[int, int, int], predictor: Predictor) -> float:
    return predictor(formula_of(scheme, heads), *sizes)


def by_model(found: Iterable[Comparison]) -> list[list[Comparison]]:
    """The comparisons of the same model on one or more texts, largest predictions first."""

    def model(comparison: Comparison) -> tuple:
        row = comparison.row
        settings = (row.scheme, row.model, row.layers, row.train_length, comparison.lengths)
        return row.paper, comparison.part, -predicted(comparison), settings

    return [list(same) for _, same in groupby(sorted(found, key=model), model)]
