"""Pictures of biases: a curve for each head, over the distance back from the last query.

Importing this module needs matplotlib, an optional dependency.
"""

import math

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

HEAD_COLORS = colormaps["viridis"]
# A key with this bias weighs exp(-20) of one without: what lies deeper is not worth the space.
DEEPEST = -20


def curves(bias, length: int) -> np.ndarray:
    """What the last of `length` queries sees at distances 0, 1, 2, ..., (heads, length)."""
    with torch.no_grad():
        dense = bias.dense(1, length)
    return dense.reshape(-1, length).flip(-1).numpy()


def one_bias(name: str, logits: np.ndarray) -> Figure:
    """A bias, and the factor that it puts on the attention weights."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    figure.suptitle(name)
    bias, factor = figure.subplots(1, 2)
    d = np.arange(logits.shape[1])
    draw(bias, d, logits)
    bias.set(xlabel="distance d", ylabel="bias b", ylim=deep_enough(logits))
    draw(factor, d + 1, np.exp(logits))
    factor.set(xlabel="d + 1", ylabel="exp(b)", xscale="log", ylim=(0, None))
    name_heads(figure, len(logits))
    return figure


def all_biases(logits: dict[str, np.ndarray]) -> Figure:
    """Every bias in a panel of its own."""
    columns = 5
    figure = Figure(figsize=(16, 8), layout="constrained")
    panels = figure.subplots(math.ceil(len(logits) / columns), columns).flat
    for (name, heads), panel in zip(logits.items(), panels, strict=False):
        draw(panel, np.arange(heads.shape[1]), heads)
        panel.set(title=name, ylim=deep_enough(heads))
    for unused in panels:
        unused.remove()
    figure.supxlabel("distance d")
    figure.supylabel("bias b")
    name_heads(figure, max(map(len, logits.values())))
    return figure


def draw(axes: Axes, x: np.ndarray, heads: np.ndarray) -> None:
    for color, curve in zip(HEAD_COLORS(np.linspace(0, 1, len(heads))), heads, strict=True):
        axes.plot(x, curve, color=color, linewidth=1.2)
    axes.set_xlim(x[0], x[-1])
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def deep_enough(logits: np.ndarray) -> tuple[float | None, float | None]:
    """Limits for the axis of biases."""
    return (DEEPEST, None) if logits.min() < DEEPEST else (None, None)


def name_heads(figure: Figure, num_heads: int) -> None:
    """A colour bar from the first head to the last."""
    colors = ScalarMappable(Normalize(1, num_heads), HEAD_COLORS)
    figure.colorbar(colors, ax=figure.axes, label="head", fraction=0.02, pad=0.01)
