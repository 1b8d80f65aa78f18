"""The picture of an `AttentionPlan`. Importing it needs matplotlib, an optional dependency."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from ..shared_constants import PLAN_QUERIES
from .report import AttentionPlan


def draw(plan: AttentionPlan) -> Figure:
    """Returns a figure of the key ranges of each head of the first sequence, and the fraction of
    tiles computed."""
    geometry = plan.geometry
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    figure.suptitle(f"computed tiles at tolerance {plan.tolerance:.3g}")
    keys, tiles = figure.subplots(1, 2)
    heads = plan.fraction.shape[1]
    colors = colormaps["viridis"](np.linspace(0, 1, heads))
    queries = np.arange(plan.first_key.shape[2]) * PLAN_QUERIES
    position = queries + geometry.n_key - geometry.n_query
    for h, color in enumerate(colors):
        first, end = plan.first_key[0, h].cpu().numpy(), plan.end_key[0, h].cpu().numpy()
        if geometry.causal:
            end = np.minimum(end, position + PLAN_QUERIES)
        keys.step(queries, first, color=color, where="post")
        keys.fill_between(queries, first, end, color=color, alpha=0.15, step="post")
    keys.set(xlabel="query", ylabel="key range", ylim=(0, max(geometry.n_key, 1)))

    tiles.bar(range(heads), 100 * plan.fraction[0].cpu().numpy(), color=colors)
    tiles.set(xlabel="head", ylabel="tiles computed, %", ylim=(0, 112), xticks=range(heads))
    for h in range(heads):
        field = "" if plan.receptive_field is None else f"\n{plan.receptive_field[h]:.3g}"
        label = f"{plan.window[0, h]}{field}"
        height = 100 * plan.fraction[0, h].item()
        tiles.annotate(label, (h, height), ha="center", va="bottom", fontsize=7)
    tiles.set_title("above each bar: window, receptive field of the bias", fontsize=9)
    return figure
