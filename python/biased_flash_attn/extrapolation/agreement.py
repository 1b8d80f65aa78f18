"""How well predictions agree with measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .comparison import Comparison, Predictor, predicted

RESAMPLES = 2000
# To which predictions are rounded: 0.9999 and 1 do not predict different losses.
DECIMALS = 3
Places = Sequence[int]  # indices of rows


class Agreement:
    """How well a predictor agrees with the losses of published rows.

    Rows that are drawn again and again, as `interval` does, are given by their places.
    """

    def __init__(self, found: Sequence[Comparison], predictor: Predictor):
        self.found = found
        self.places = range(len(found))
        values = [round(predicted(c, predictor), DECIMALS) for c in found]
        self.predicted = torch.tensor(values, dtype=torch.float64)
        self.losses = torch.tensor([c.loss for c in found], dtype=torch.float64)

    @property
    def schemes(self) -> list[list[int]]:
        """The places of each scheme's rows."""
        places: dict[str, list[int]] = {}
        for n, comparison in enumerate(self.found):
            places.setdefault(comparison.row.scheme, []).append(n)
        return list(places.values())

    @property
    def altered(self) -> list[list[int]]:
        """Those of the schemes with altered slopes and windows."""
        return [
            rows for rows in self.schemes if any(self.found[n].of_altered_attention for n in rows)
        ]

    def overall(self, places: Places | None = None) -> float:
        """Spearman's correlation of all rows, with whatever text, model and training length."""
        places = list(self.places if places is None else places)
        return rank_correlation(self.predicted[places], self.losses[places])

    def within(self, places: Places | None = None) -> float:
        """Spearman's correlation of the altered slopes and windows within a text, the mean of the
        texts; NaN without them."""
        texts: dict[str, list[int]] = {}
        for n in self.places if places is None else places:
            if self.found[n].of_altered_attention:
                texts.setdefault(self.found[n].row.dataset, []).append(n)
        found = [self.overall(same) for same in texts.values()]
        return sum(found) / len(found) if found else math.nan

    def score(self) -> float:
        """What the choice of a variant maximizes."""
        return (self.within() + self.overall()) / 2

    def doubled(self) -> float:
        """The fraction of pairs of a row whose perplexity more than doubles and one whose does not
        that the predictor puts in the right order; ties count one half."""
        doubled = self.losses > math.log(2)
        pairs = self.predicted[doubled][:, None] - self.predicted[~doubled]
        pairs = pairs.nan_to_num(0)  # NaN is of two infinite fields
        return ((pairs > 0) + (pairs == 0).double() / 2).mean().item()

    def interval(self, statistic: Callable[[Places], float]) -> tuple[float, float]:
        """95 % of a statistic, by drawing schemes, with all their rows, with replacement.

        Draws without a correlation, because all their rows are equal, are left out.
        """
        schemes = self.schemes
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(len(schemes), (RESAMPLES, len(schemes)), generator=generator)
        values = [statistic([n for s in draw for n in schemes[s]]) for draw in drawn.tolist()]
        quantiles = torch.tensor([0.025, 0.975], dtype=torch.float64)
        low, high = torch.tensor(values, dtype=torch.float64).nanquantile(quantiles).tolist()
        return low, high


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Spearman's correlation, NaN for constant values; ties have the mean of their ranks."""
    x, y = (ranks(z) - (len(z) - 1) / 2 for z in (x, y))
    return (x @ y / (x.norm() * y.norm())).item()


def ranks(x: Tensor) -> Tensor:
    """The ranks from 0 on of n values, (n,) float64; ties have the mean of theirs."""
    smaller = (x[:, None] > x).sum(-1)
    return (smaller + (x[:, None] >= x).sum(-1) - 1).double() / 2
