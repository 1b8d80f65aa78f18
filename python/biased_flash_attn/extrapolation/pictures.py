"""Plots of biases before training: curves, heat maps and theoretical receptive fields.

Importing this module needs matplotlib, an optional dependency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from ..biases import Bias

HEAD_COLORS = colormaps["viridis"]
BIAS_COLORS = colormaps["turbo"]
SIGNED_COLORS = colormaps["RdBu_r"]
COLUMNS = 6
MAPPED = 256  # the largest number of positions in a heat map
QUERIES = 3  # whose curves are drawn, of a bias that depends on the query
NEAR = 32  # distances that are magnified, on both sides
# Smaller biases are not shown: a key with this bias has exp(-20) of the weight of one without.
LOWEST = -20


def curves(bias, length: int) -> np.ndarray:
    """The bias of the last of `length` queries at distances 0, 1, 2, ..., (heads, length).

    bias: any object with `dense(n_query, n_key)`, whose values per query are those of the last one.
    """
    with torch.no_grad():
        dense = bias.dense(1, length)
    return dense.reshape(-1, length).flip(-1).numpy()


def weights(bias, length: int) -> np.ndarray:
    """exp(b) of pairs of positions, averaged over the heads, (query, key); NaN for later keys.

    bias: an object with `dense(n_query, n_key)`. For longer sequences only the last MAPPED
    positions are included, and only their queries may have values.
    """
    n = min(length, MAPPED)
    with torch.no_grad():
        mean = bias.dense(n, length)[..., -n:].exp().reshape(-1, n, n).mean(0)
    return mean.masked_fill(torch.ones_like(mean).triu(1).bool(), torch.nan).numpy()


def rows(bias, length: int) -> np.ndarray:
    """The first head's bias of the last MAPPED queries and all keys, (query, key).

    bias: as for `weights`.
    """
    with torch.no_grad():
        dense = bias.dense(min(length, MAPPED), length)
    return dense.flatten(0, -3)[0].numpy()


def of_bias(
    name: str, bias: Bias, inputs: tuple[Tensor | None, Tensor | None, Tensor | None], length: int
) -> Figure:
    """The figure of a bias for hidden states, queries and keys, or for `length` tokens."""
    x, q, k = (None if t is None else t[:1] for t in inputs)
    length = next((t.shape[-2] for t in (x, q, k) if t is not None), length)
    if q is None and x is not None:
        q = x[:, None]  # only their number is read: that of queries is not that of hidden states

    def of_last(n_query: int):
        return bias(x, q if q is None else q[:, :, -n_query:], k)

    several = of_last(min(length, MAPPED))
    if getattr(several, "depends_on_content", False):
        return query_dependent_bias(name, rows(several, length))
    return one_bias(name, curves(of_last(1), length), weights(several, length))


def one_bias(name: str, logits: np.ndarray, pairs: np.ndarray) -> Figure:
    """A bias, the resulting factor of the attention weights, and the factor's heat map.

    logits is a result of `curves`, pairs one of `weights`.
    """
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    figure.suptitle(name)
    bias, factor, heat = figure.subplots(1, 3)
    d = np.arange(logits.shape[1])
    draw(bias, d, logits)
    bias.set(xlabel="distance d", ylabel="bias b", ylim=bias_limits(logits))
    draw(factor, d + 1, np.exp(logits))
    factor.set(xlabel="d + 1", ylabel="exp(b)", xscale="log", ylim=(0, None))
    add_head_colors([bias, factor], len(logits))
    image = draw_heat(heat, pairs)
    heat.set(xlabel="key", ylabel="query")
    figure.colorbar(image, ax=heat, label="exp(b), mean of the heads")
    return figure


def query_dependent_bias(name: str, logits: np.ndarray) -> Figure:
    """The bias of some queries of a head: of all past keys, and of the nearest on both sides; and a
    heat map of the last pairs.

    logits is a result of `rows`.
    """
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    figure.suptitle(f"{name}, head 1")
    past, near, heat = figure.subplots(1, 3)
    n_query, n_key = logits.shape
    chosen = np.unique(np.linspace(0, n_query - 1, QUERIES + 2).astype(int)[1:-1])
    for color, row in zip(HEAD_COLORS(np.linspace(0, 0.85, len(chosen))), chosen, strict=True):
        position = n_key - n_query + row
        d = position - np.arange(n_key)
        style = {"color": color, "linewidth": 1.2, "label": f"query {position}"}
        past.plot(d[d >= 0] + 1, logits[row, d >= 0], **style)
        near.plot(d, logits[row], **style)
    past.set(xlabel="d + 1", xscale="log", xlim=(1, n_key), ylabel="bias b")
    near.set(xlabel="distance d, negative for keys after the query", xlim=(-NEAR, NEAR))
    near.legend(fontsize=8)
    for axes in (past, near):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    size = min(n_query, 2 * NEAR)
    largest, ends = np.abs(logits).max(), (n_key - size - 0.5, n_key - 0.5)
    image = heat.imshow(
        logits[-size:, -size:],
        cmap=SIGNED_COLORS,
        norm=Normalize(-largest, largest),
        extent=(*ends, *ends[::-1]),
    )
    heat.set(xlabel="key", ylabel="query")
    figure.colorbar(image, ax=heat, label="bias b")
    return figure


def all_biases(logits: dict[str, np.ndarray]) -> Figure:
    """One panel per bias."""
    figure, panels = grid(len(logits))
    for (name, heads), panel in zip(logits.items(), panels, strict=True):
        draw(panel, np.arange(heads.shape[1]), heads)
        panel.set(title=name, ylim=bias_limits(heads))
    figure.supxlabel("distance d")
    figure.supylabel("bias b")
    add_head_colors(panels, max(map(len, logits.values())))
    return figure


def heat_maps(pairs: dict[str, np.ndarray]) -> Figure:
    """Heat maps of several biases, results of `weights` (Qin et al., 2023, figure 8)."""
    figure, panels = grid(len(pairs))
    for (name, weights_of_bias), panel in zip(pairs.items(), panels, strict=True):
        draw_heat(panel, weights_of_bias)
        panel.set(title=name)
    figure.supxlabel("key")
    figure.supylabel("query")
    return figure


def receptive_fields(curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """The fraction of the length that holds all but eps (Qin et al., 2023, figure 5)."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for color, (name, (field, eps)) in zip(
        BIAS_COLORS(np.linspace(0.03, 0.97, len(curves))), curves.items(), strict=True
    ):
        axes.plot(field, eps, color=color, label=name)
    axes.set(xlabel="fraction of the length", ylabel="eps, the fraction of exp(b) beyond")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def grid(panels: int) -> tuple[Figure, list[Axes]]:
    """A figure with this number of panels."""
    rows = math.ceil(panels / COLUMNS)
    columns = min(panels, COLUMNS)
    figure = Figure(figsize=(3.2 * columns, 2.7 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[panels:]:
        unused.remove()
    return figure, axes[:panels]


def draw_heat(axes: Axes, pairs: np.ndarray) -> AxesImage:
    # The square root makes small values at large distances visible.
    return axes.imshow(pairs, norm=PowerNorm(0.5, vmin=0), cmap="magma")


def draw(axes: Axes, x: np.ndarray, heads: np.ndarray) -> None:
    for color, curve in zip(HEAD_COLORS(np.linspace(0, 1, len(heads))), heads, strict=True):
        axes.plot(x, curve, color=color, linewidth=1.2)
    axes.set_xlim(x[0], x[-1])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def bias_limits(logits: np.ndarray) -> tuple[float | None, float | None]:
    """Limits for the axis of biases."""
    if logits.min() >= LOWEST:
        return None, None
    return LOWEST, max(logits.max(), 0) + 1


def add_head_colors(axes: Sequence[Axes], num_heads: int) -> None:
    """A colour bar of the heads beside the axes with their curves, if there are several."""
    if num_heads == 1:
        return
    colors = ScalarMappable(Normalize(0.5, num_heads + 0.5), HEAD_COLORS.resampled(num_heads))
    ticks = MaxNLocator(integer=True)
    axes[0].figure.colorbar(colors, ax=axes, label="head", ticks=ticks, fraction=0.02, pad=0.01)
