"""Adds generated pictures and pages, and the files of results, to the site."""

from __future__ import annotations

import html
import io
import logging
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from plotly.offline import get_plotlyjs
from torch import Tensor

from biased_flash_attn import attention_plan, biases
from biased_flash_attn.cli.plot import HEAD_DIM, bias_of, figure_of, random_layer
from biased_flash_attn.distributed.layout import chunks_of
from biased_flash_attn.extrapolation import mean_receptive_field, pictures
from biased_flash_attn.extrapolation.experiment import picture as text_picture
from biased_flash_attn.extrapolation.experiment import report as text_report
from biased_flash_attn.extrapolation.synthetic import picture as task_picture
from biased_flash_attn.extrapolation.synthetic import report as task_report
from biased_flash_attn.nn.named_biases import make

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
HEADS, LENGTH = 8, 512
QUERY_LENGTH = 1536  # beyond the ends of all tables
RANKS = 4
# The modules that read and draw the results of experiments, by folder.
EXPERIMENTS = {
    "extrapolation": (text_report, text_picture),
    "reproduction": (text_report, text_picture),
    "synthetic": (task_report, task_picture),
}
LIBRARY = "../plotly.min.js"  # of the pages with their plots
DPI = 100
log = logging.getLogger("mkdocs.hooks")


def on_files(files: Files, config) -> Files:
    """Adds pictures/ and results/."""
    for name in drawings():
        file = File.generated(config, f"pictures/{name}.png", content=png(name))
        files.append(file)
    for path in sorted(RESULTS.rglob("*.*")):
        place = Path("results") / path.relative_to(RESULTS)
        files.append(File.generated(config, place.as_posix(), abs_src_path=str(path)))
    library = File.generated(config, "results/plotly.min.js", content=get_plotlyjs())
    files.append(library)
    for folder, (report, picture) in EXPERIMENTS.items():
        for path in sorted((RESULTS / folder).glob("*.json")):
            # The tables beside become a page without the suffix.
            place = f"results/{folder}/{path.stem}-plot.html"
            page = picture.page(*report.read_report(path), LIBRARY)
            files.append(File.generated(config, place, content=page))
    return files


def on_page_markdown(markdown: str, page: Page, **_) -> str:
    """Adapts links to the site, where results/ is a folder and DESIGN.md a page."""
    if page.file.src_uri == "design.md":
        return (ROOT / "DESIGN.md").read_text().replace("](docs/", "](")
    return re.sub(r"\]\(\.\./((?:\.\./)*)bench/results/", r"](\1results/", markdown)


def on_page_content(content: str, page: Page, **_) -> str:
    """Fails if a file was to be included and is not."""
    # Highlighted code has tags between the characters.
    text = html.unescape(re.sub(r"<[^>]*>", "", content))
    if include := re.search(r"--\s*8\s*<.*", text):
        raise PluginError(f"{page.file.src_uri} shows the line {include[0]!r} and not the file")
    return content


@cache
def png(name: str) -> bytes:
    log.info("Drawing %s", name)
    torch.manual_seed(0)
    buffer = io.BytesIO()
    drawings()[name]().savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def drawings() -> dict[str, Callable[[], Figure]]:
    """The functions that draw the pictures, by name."""
    lengths = dict.fromkeys(biases.NAMED, LENGTH)
    lengths |= dict.fromkeys(biases.QUERY_BIASES, QUERY_LENGTH)
    bias_figures = {name: partial(figure_of, name, HEADS, n) for name, n in lengths.items()}
    plans = {
        f"plan_{name}": partial(plan_of, biases.DISTANCE_BIASES[name])
        for name in ("alibi", "type2", "sandwich")
    }
    others = (all_biases, heat_maps, receptive_fields, distant_mass, chunks)
    return {**{draw.__name__: draw for draw in others}, **bias_figures, **plans}


def all_biases() -> Figure:
    layer = random_layer(HEADS, LENGTH)
    modules = {name: make(kind, HEADS, HEADS * HEAD_DIM) for name, kind in biases.NAMED.items()}
    made = {name: bias_of(module, layer, 1) for name, module in modules.items()}
    return pictures.all_biases({name: pictures.curves(b, LENGTH) for name, b in made.items()})


def heat_maps() -> Figure:
    made = {name: bias(HEADS) for name, bias in biases.DISTANCE_BIASES.items()}
    return pictures.heat_maps({name: pictures.weights(b, LENGTH) for name, b in made.items()})


def receptive_fields() -> Figure:
    fields = {}
    for name, bias in biases.DISTANCE_BIASES.items():
        weights = torch.from_numpy(pictures.curves(bias(HEADS), LENGTH)).exp()
        fields[name] = tuple(x.numpy() for x in mean_receptive_field(weights))
    return pictures.receptive_fields(fields)


def distant_mass() -> Figure:
    """The attention weight beyond a distance, and the windows of the plan of each head."""
    length, alibi = 2048, biases.ALiBi(HEADS)
    q, k = torch.randn(2, 1, HEADS, length, 64)
    plan = attention_plan(q, k, alibi)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(plan.tolerance, color="black", linestyle="--", linewidth=1)
    for h, color in enumerate(pictures.HEAD_COLORS(np.linspace(0, 1, HEADS))):
        axes.plot(
            largest_fraction_beyond(q[0, h], k[0, h], alibi.dense(length, length)[h]), color=color
        )
        if (window := plan.window[0, h].item()) < length:
            axes.plot(window, plan.tolerance, "o", color=color)
    axes.set(xlabel="distance d", ylabel="fraction of attention at d and beyond", yscale="log")
    axes.set(xlim=(0, length), ylim=(1e-14, 2))
    axes.grid(alpha=0.25)
    pictures.add_head_colors([axes], HEADS)
    return figure


def largest_fraction_beyond(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """The largest fraction of a query's attention at each distance and beyond, (length,) float64.

    q and k (length, D); bias (length, length) float64.
    """
    length = len(q)
    d = torch.arange(length)[:, None] - torch.arange(length)
    logits = (q @ k.T / q.shape[1] ** 0.5 + bias).masked_fill(d < 0, -torch.inf)
    # The key at distance d of query i is i - d: columns become distances.
    by_distance = logits.softmax(-1).gather(1, d.clamp(min=0)).masked_fill(d < 0, 0)
    return by_distance.flip(1).cumsum(1).flip(1).amax(0)


def plan_of(bias: type[biases.DistanceBias]) -> Figure:
    q, k = torch.randn(2, 1, HEADS, 4096, 64)
    return attention_plan(q, k, bias(HEADS)).draw()


def chunks() -> Figure:
    """The rank of each pair of chunks, for RANKS ranks under a causal mask."""
    count = 2 * RANKS
    owner = np.full((count, count), np.nan)
    for rank in range(RANKS):
        for chunk in chunks_of(rank, RANKS):
            owner[chunk, : chunk + 1] = rank
    figure = Figure(figsize=(5.2, 4.2), layout="constrained")
    axes = figure.subplots()
    colors = pictures.HEAD_COLORS.resampled(RANKS)
    image = axes.imshow(owner, cmap=colors, vmin=-0.5, vmax=RANKS - 0.5)
    axes.set(xlabel="chunk of keys", ylabel="chunk of queries")
    figure.colorbar(image, label="rank", ticks=range(RANKS))
    return figure
