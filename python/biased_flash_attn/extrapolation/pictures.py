"""Pictures of biases before any training: curves, heat maps and theoretical receptive fields.

Importing this module needs matplotlib, an optional dependency.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, PowerNorm
from matplotlib.figure import Figure

HEAD_COLORS = colormaps["viridis"]
BIAS_COLORS = colormaps["turbo"]
COLUMNS = 5
MAPPED = 256  # positions of a heat map, at most
# A key with this bias weighs exp(-20) of one without: what lies deeper is not worth the space.
DEEPEST = -20


def curves(bias, length: int) -> np.ndarray:
    """What the last of `length` queries sees at distances 0, 1, 2, ..., (heads, length).

    bias: anything with `dense(n_query, n_key)`.
    """
    with torch.no_grad():
        dense = bias.dense(1, length)
    return dense.reshape(-1, length).flip(-1).numpy()


def weights(bias, length: int) -> np.ndarray:
    """exp(b) of pairs of positions, the mean of the heads, (query, key); NaN for later keys.

    bias: as for `curves`. Of longer sequences it is that of the last MAPPED positions.
    """
    n = min(length, MAPPED)
    with torch.no_grad():
        mean = bias.dense(n, length)[..., -n:].exp().reshape(-1, n, n).mean(0)
    return mean.masked_fill(torch.ones_like(mean).triu(1).bool(), torch.nan).numpy()


def one_bias(name: str, logits: np.ndarray, pairs: np.ndarray) -> Figure:
    """A bias, the factor that it puts on the attention weights, and that factor's heat map.

    logits is what `curves` gives, pairs what `weights` gives.
    """
    figure = Figure(figsize=(15, 4.2), layout="constrained")
    figure.suptitle(name)
    bias, factor, heat = figure.subplots(1, 3)
    d = np.arange(logits.shape[1])
    draw(bias, d, logits)
    bias.set(xlabel="distance d", ylabel="bias b", ylim=deep_enough(logits))
    draw(factor, d + 1, np.exp(logits))
    factor.set(xlabel="d + 1", ylabel="exp(b)", xscale="log", ylim=(0, None))
    draw_heat(heat, pairs)
    heat.set(xlabel="key", ylabel="query", title="exp(b), mean of the heads")
    name_heads(figure, len(logits))
    return figure


def all_biases(logits: dict[str, np.ndarray]) -> Figure:
    """Every bias in a panel of its own."""
    figure, panels = grid(len(logits))
    for (name, heads), panel in zip(logits.items(), panels, strict=True):
        draw(panel, np.arange(heads.shape[1]), heads)
        panel.set(title=name, ylim=deep_enough(heads))
    figure.supxlabel("distance d")
    figure.supylabel("bias b")
    name_heads(figure, max(map(len, logits.values())))
    return figure


def heat_maps(pairs: dict[str, np.ndarray]) -> Figure:
    """What `weights` gives of several biases (Qin et al., 2023, figure 8)."""
    figure, panels = grid(len(pairs))
    for (name, of_bias), panel in zip(pairs.items(), panels, strict=True):
        draw_heat(panel, of_bias)
        panel.set(title=name)
    figure.supxlabel("key")
    figure.supylabel("query")
    return figure


def receptive_fields(curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """The shares of the length within which all but eps lies (Qin et al., 2023, figure 5)."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for color, (name, (field, eps)) in zip(
        BIAS_COLORS(np.linspace(0.03, 0.97, len(curves))), curves.items(), strict=True
    ):
        axes.plot(field, eps, color=color, label=name)
    axes.set(xlabel="share of the length", ylabel="eps, the share of exp(b) farther away")
    axes.grid(alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def grid(panels: int) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels."""
    rows = math.ceil(panels / COLUMNS)
    columns = min(panels, COLUMNS)
    figure = Figure(figsize=(3.2 * columns, 2.7 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in axes[panels:]:
        unused.remove()
    return figure, axes[:panels]


def draw_heat(axes: Axes, pairs: np.ndarray) -> None:
    # The square root shows what is far away and small, too.
    axes.imshow(pairs, norm=PowerNorm(0.5, vmin=0), cmap="magma")


def draw(axes: Axes, x: np.ndarray, heads: np.ndarray) -> None:
    for color, curve in zip(HEAD_COLORS(np.linspace(0, 1, len(heads))), heads, strict=True):
        axes.plot(x, curve, color=color, linewidth=1.2)
    axes.set_xlim(x[0], x[-1])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def deep_enough(logits: np.ndarray) -> tuple[float | None, float | None]:
    """Limits for the axis of biases."""
    if logits.min() >= DEEPEST:
        return None, None
    return DEEPEST, max(logits.max(), 0) + 1


def name_heads(figure: Figure, num_heads: int) -> None:
    """A colour bar from the first head to the last."""
    colors = ScalarMappable(Normalize(1, num_heads), HEAD_COLORS)
    figure.colorbar(colors, ax=figure.axes, label="head", fraction=0.02, pad=0.01)
