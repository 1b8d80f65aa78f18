"""The plots of the README and of docs/performance.md, drawn from the latest run of `make bench`.

Every point is a measurement. Values extrapolated from measurements are dashed and labelled.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import ROOT
from bench.reports.latest import row, seconds
from bench.reports.results import three_digits

FOLDER = ROOT / "docs" / "plots"
SETTING = "forward and backward, 8 heads of 64 channels, causal, 2 cores of an AMD EPYC"
# Keeps text as text, and makes the files reproducible.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "biased_flash_attn", "font.size": 10}
OURS, SKIPPED, SDPA, DENSE, PLAIN = "#2f5fb3", "#1b9e77", "#8a8a8a", "#d98c1f", "#b3432f"
OF_POSITIONS = {
    "alibi": "ALiBi",
    "kerple_log": "KERPLE",
    "sandwich": "Sandwich",
    "t5": "T5",
    "fire": "FIRE",
    "cable": "CABLE",
    "forget_gate": "forget\ngate",
    "kernelized_cable": "kernelized\nCABLE",
}
OF_QUERIES = {
    "gated_table": "WavLM",
    "shaw": "Shaw",
    "banded": "Inkling",
    "disentangled": "DeBERTa",
    "transformer_xl": "Transformer-\nXL",
}
WIDE = ("banded",)  # measured with heads of 128 channels
BIASES = {
    **{f"{name} against no bias": label for name, label in OF_POSITIONS.items()},
    **{
        f"{name} against no bias at N = 4096, D = {128 if name in WIDE else 64}": label
        for name, label in OF_QUERIES.items()
    },
}


def time_against_length(axes: Axes) -> None:
    kerple, sdpa_4096 = seconds("kerple_log against SDPA without bias")
    alibi_4096, _ = seconds("alibi against no bias")  # nothing is skipped there
    alibi_16384, whole_16384 = seconds("alibi against itself at tolerance 0, N = 16384")
    alibi_65536, whole_65536 = seconds("alibi against itself at tolerance 0, N = 65536")
    _, sixteen_times = seconds("alibi at N = 65536 against 16 times SDPA without bias at N = 16384")
    _, dense = seconds("sandwich against SDPA with a dense mask")
    _, plain = seconds("kerple_log against plain PyTorch with autograd")
    lines = [
        ("plain PyTorch, KERPLE trained", PLAIN, {4096: plain}),
        ("SDPA, dense bias, not trained", DENSE, {4096: dense}),
        ("SDPA, no bias", SDPA, {4096: sdpa_4096, 16384: sixteen_times / 16}),
        (
            "this package, ALiBi, tolerance=0",
            OURS,
            {4096: alibi_4096, 16384: whole_16384, 65536: whole_65536},
        ),
        (
            "this package, ALiBi, default tolerance",
            SKIPPED,
            {16384: alibi_16384, 65536: alibi_65536},
        ),
    ]
    for name, color, points in lines:
        axes.plot(points.keys(), points.values(), "o-", color=color, label=name)
        for length, time in points.items():
            axes.annotate(
                f"{three_digits(time)} s",
                (length, time),
                (6, -11),
                textcoords="offset points",
                color=color,
            )
        if color in (PLAIN, DENSE, SDPA):
            last = max(points)
            quadratic = [points[last], points[last] * (65536 / last) ** 2]
            axes.plot([last, 65536], quadratic, "--", color=color, linewidth=1)
    axes.plot([4096], [kerple], "s", color=OURS, label="this package, KERPLE trained")
    axes.annotate(
        f"{three_digits(kerple)} s",
        (4096, kerple),
        (-42, -3),
        textcoords="offset points",
        color=OURS,
    )
    axes.plot([], [], "--", color="black", linewidth=1, label="estimate: grows with N²")
    axes.set(xscale="log", yscale="log", xlabel="tokens N", ylabel="seconds, float32")
    axes.set(xlim=(3000, 110000), ylim=(0.1, 3000))
    lengths = (4096, 16384, 65536)
    axes.set_xticks(lengths, map(str, lengths))
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="upper left")


def memory_against_length(axes: Axes) -> None:
    lengths = (1024, 4096, 16384, 65536)
    dense = [8 * n * n * 4 / 2**20 for n in lengths]
    axes.plot(
        lengths, dense, "--", color=DENSE, label="one dense bias (8, N, N) in float32, computed"
    )
    for length, size in zip(lengths[1:3], dense[1:3], strict=True):
        axes.annotate(
            f"{size:.0f} MiB", (length, size), (6, -11), textcoords="offset points", color=DENSE
        )
    work = "peak memory beyond inputs, outputs and gradients at N = 16384, kerple_log"
    size = row(work, "float32").measured
    axes.plot([16384], [size], "s", color=OURS, label="this package, KERPLE trained, measured")
    axes.annotate(
        f"{size:.1f} MiB", (16384, size), (6, -11), textcoords="offset points", color=OURS
    )
    axes.set(xscale="log", yscale="log", xlabel="tokens N")
    axes.set(ylabel="MiB beyond inputs, outputs, gradients", ylim=(10, 1e6))
    axes.set_xticks(lengths, map(str, lengths))
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, loc="upper left")


def cost_of_biases(axes: Axes) -> None:
    for shift, dtype, color in ((-0.2, "float32", OURS), (0.2, "bfloat16", SKIPPED)):
        rows = [row(work, dtype) for work in BIASES]
        medians = [x.measured for x in rows]
        quartiles = [statistics.quantiles(x.values, n=4) for x in rows]
        whiskers = [
            [m - q[0] for m, q in zip(medians, quartiles, strict=True)],
            [q[2] - m for m, q in zip(medians, quartiles, strict=True)],
        ]
        places = [n + shift for n in range(len(rows))]
        axes.bar(places, medians, 0.38, yerr=whiskers, color=color, label=dtype, ecolor="black")
        for place, median, quartile in zip(places, medians, quartiles, strict=True):
            axes.text(place, quartile[2] + 0.02, f"{median:.2f}", ha="center", fontsize=7)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(BIASES)), BIASES.values())
    axes.set(ylabel="time relative to no bias", ylim=(0, 2.6))
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8, loc="upper left")


def figures() -> dict[str, Figure]:
    """Every plot by the name of its file."""
    time = Figure(figsize=(7.5, 4.8), layout="constrained")
    time_against_length(time.subplots())
    time.suptitle(SETTING[0].upper() + SETTING[1:], fontsize=9)
    memory = Figure(figsize=(7.5, 4), layout="constrained")
    memory_against_length(memory.subplots())
    memory.suptitle(f"Peak memory, {SETTING}", fontsize=9)
    biases = Figure(figsize=(10.5, 3.8), layout="constrained")
    cost_of_biases(biases.subplots())
    biases.suptitle(
        f"4096 tokens, nothing skipped, {SETTING}; Inkling with 128 channels, DeBERTa not causal",
        fontsize=9,
    )
    return {"time": time, "memory": memory, "biases": biases}


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        for name, figure in figures().items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
