"""Tables of estimates of the CUDA kernels, as text and as a document in bench/results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench import RESULTS
from biased_flash_attn.cuda_kernels import nvrtc

from .. import report
from ..calibration import FRACTION
from ..report import BOUND, CHANNELS, TOKENS, committed_problem, table
from ..times import BACKWARD, Problem
from . import times, turns
from .calibration import GPU, Prediction, stated_error
from .kernels import ALL, FORWARD, KINDS, Kernel, backward, build
from .published import FLASH, ROWS, SOURCES
from .skipping import LENGTH, Skipping

# By the class of a form in csrc/cuda/forms, the name that the tables of Triton's kernels have.
FORMS = {
    "None": report.FORMS["none"],
    "Linear": report.FORMS["linear"],
    "Cumulative": report.FORMS["cumulative"],
    "CumulativeWithGain": report.FORMS["cumulative-gain"],
    "Distance": report.FORMS["distance"],
    "LogSquareWithGain": report.FORMS["log1p_square-gain"],
}
HEAD_DIMS = (64, 128, 256)
WIDEST = 128  # channels of the widest heads whose backward pass is modelled
NOTHING = "-"


@dataclass(frozen=True)
class Line:
    """A kernel of a training step and its estimate."""

    kernel: Kernel
    cells: tuple[str, ...]
    milliseconds: float


def lines(form: str, head_dim: int) -> list[Line]:
    """The kernels of both directions; biases are trained."""
    names = (FORWARD, *(backward(form, head_dim) if head_dim <= WIDEST else ()))
    return [_line(build(name, form, head_dim, is_trained(name, form))) for name in names]


def is_trained(name: str, form: str) -> bool:
    return name != FORWARD and form in KINDS[name].trainable


def _line(kernel: Kernel) -> Line:
    variant, size = kernel.variant, committed_problem(kernel.variant.head_dim)
    bound, milliseconds = times.bound(kernel, GPU, size), times.milliseconds(kernel, GPU, size)
    is_busy = bound.fraction >= BOUND
    pairs = kernel.block_n / 2  # of a thread and a tile
    cells = (
        *(FORMS[variant.form], str(variant.head_dim), kernel.name),
        *(f"{kernel.block_m} x {kernel.block_n}, {variant.tile.stages}",),
        f"{len(kernel.paths.whole) / pairs:.1f}",
        *(f"{bound.units[unit]:.0f}" for unit in times.UNITS),
        f"{bound.cycles:.0f}",
        f"{'' if is_busy else 'latency, then '}{bound.unit} ({bound.fraction:.0%})",
        f"{milliseconds:.2f}",
    )
    return Line(kernel, cells, milliseconds)


KERNEL_COLUMNS = (
    *("bias", "head_dim", "kernel", "tile, stages", "instructions"),
    *times.UNITS,
    *("simulated", "bound by", "ms"),
)


def totals(found: Iterable[Line]) -> list[tuple[str, ...]]:
    """Both directions of each bias and head_dim, and the estimates and timings of others."""
    spent: dict[tuple[str, int], dict[bool, float]] = {}
    for line in found:
        form, width = line.kernel.variant.form, line.kernel.variant.head_dim
        around = times.milliseconds_around(line.kernel.name, GPU, committed_problem(width))
        is_backward, of_key = line.kernel.name != FORWARD, spent.setdefault((form, width), {})
        of_key[is_backward] = of_key.get(is_backward, 0.0) + line.milliseconds + around
    triton, rows = _of_triton(), []
    for (form, width), both in spent.items():
        row = [FORMS[form], str(width)]
        for is_backward in (False, True):
            if is_backward not in both:
                row += [NOTHING] * 5
                continue
            flops = committed_problem(width).flops * (BACKWARD if is_backward else 1)
            time = both[is_backward]
            without = spent.get(("None", width), {}).get(is_backward, math.nan)
            row += [f"{time:.2f}", f"{flops / time * 1e-9:.0f}", f"{time / without:.2f}"]
            row.append(triton.get((FORMS[form], str(width), is_backward), NOTHING))
            row.append(_of_flash(width, is_backward) if form == "None" else NOTHING)
        rows.append(tuple(row))
    return rows


_OF_DIRECTION = ("TFLOP/s", "of no bias", "Triton's", "FA3's")
TOTAL_COLUMNS = (
    *("bias", "head_dim", "forward, ms", *_OF_DIRECTION),
    *("backward, ms", *_OF_DIRECTION),
)


def _of_triton() -> dict[tuple[str, str, bool], str]:
    """The TFLOP/s in the document of the Triton kernels."""
    found = {}
    for line in (RESULTS / "estimates-sm_90.md").read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) == len(report.TOTAL_COLUMNS) and cells[1].isdigit():
            found[cells[0], cells[1], False] = cells[3]
            found[cells[0], cells[1], True] = cells[6]
    return found


def _of_flash(head_dim: int, backward: bool) -> str:
    """The published TFLOP/s: causal or, where only that was timed, without a mask."""
    rows = [
        row
        for row in ROWS
        if row.source == FLASH and row.backward == backward and row.problem.n == TOKENS
        if row.problem.head_dim == head_dim
    ]
    rows.sort(key=lambda row: row.problem.causal, reverse=True)
    if not rows:
        return NOTHING
    return f"{rows[0].tflops:.0f}{'' if rows[0].problem.causal else ' (full)'}"


def calibration(found: Iterable[Prediction]) -> str:
    rows = []
    for one in found:
        row, size = one.row, one.row.problem
        use = "fitted" if row.is_fitted else "predicted"
        rows.append(
            (
                *(row.source, "backward" if row.backward else "forward"),
                f"{'causal' if size.causal else 'full'}, {size.batch} x {size.heads} x {size.n}",
                *(str(size.head_dim), f"{row.tflops:.0f}", f"{row.tflops / (1 + one.error):.0f}"),
                *(f"{one.error:+.0%}", use if row.is_alike else "another structure"),
            )
        )
    columns = ("kernel", "pass", "B x H x N", "head_dim", "published TFLOP/s", "estimated")
    return table((*columns, "error in time", ""), rows)


TURN_COLUMNS = ("tokens", "heads", "head_dim", "in turn, ms", "in any order, ms", "ratio")
LENGTHS = (4096, 16384, 65536)


def of_turns() -> list[tuple[str, ...]]:
    """What it costs that blocks of keys add to dq in a fixed order."""
    rows = []
    for head_dim in (x for x in HEAD_DIMS if x <= WIDEST):
        kernel = build(ALL, "None", head_dim)
        for n in LENGTHS:
            problem = Problem(1, CHANNELS // head_dim, n, head_dim)
            found = [times.milliseconds(kernel, GPU, problem, x) for x in (True, False)]
            sizes = str(n), str(problem.heads), str(head_dim)
            rows.append((*sizes, *(f"{x:.2f}" for x in found), f"{found[0] / found[1]:.3f}"))
    return rows


SKIPPING_COLUMNS = ("heads", "head_dim", "tiles kept", "all, ms", "kept, ms", "ratio")


def document(
    found: Sequence[Line], predicted: Sequence[Prediction], skipped: Iterable[Skipping]
) -> str:
    error = stated_error(predicted)
    sources = "\n".join(f"- {name}: {text}." for name, text in SOURCES.items())
    release = ".".join(map(str, nvrtc.version()))
    return f"""# Estimated speed of the CUDA kernels on an {GPU.name}

**Estimates, not measurements: none of these kernels has been timed.** The error of each is
±{error:.0%}: {FRACTION:.0%} of the published timings of kernels like ours that were predicted and
not fitted lie within it (see the last table).

Made with NVRTC {release} by `python -m bench.estimates.cuda.run`, for bfloat16, causal attention,
batch 1, {TOKENS} tokens, {CHANNELS} channels in heads of head_dim. Biases are trained. Gradients of
heads of 256 are not modelled.

## Both directions

The backward pass is one kernel, which adds to dq in a fixed order; with an outer function, it is
two. FLOPs are counted as in the [estimates of the Triton kernels](estimates-sm_90.md), whose
TFLOP/s are in the columns *Triton's*. *FA3's* are the timings of FlashAttention-3, without a bias.
Its backward pass was timed without a mask, and adds to dQ in an order that changes from run to run.

{table(TOTAL_COLUMNS, totals(found))}
## Kernels

Of the loop over whole tiles: rows of a block x rows of a tile, and stages; instructions of a thread
for each pair of query and key; cycles for which a block occupies each unit in one tile; and the
cycles that the simulation takes for it. Shared memory includes the operands of products and the
tiles that are copied, or added to dq; HBM is what remains of these if blocks that run at once share
them in the L2 cache. Units include the work of warps that sum gradients of the bias. Where the
busiest unit is busy for less than {BOUND:.0%} of the cycles, the loop is bound by latency that
nothing hides.

{table(KERNEL_COLUMNS, (line.cells for line in found))}
## Order of additions

The backward pass without a bias: if blocks add to dq of a tile in the order of their keys, which
gives the same result in each run, and if they add in any order. It is assumed that the additions of
a block to a tile take {turns.WRITE:.0f} ns, and that the next block sees {turns.PASS:.0f} ns later
that it has the turn.

{table(TURN_COLUMNS, of_turns())}
## Skipping

A training step with ALiBi over {LENGTH} tokens: all tiles, and those that a plan at the default
tolerance keeps for q, k and v from a normal distribution. The time of making the plan is not
included.

{table(SKIPPING_COLUMNS, (one.cells for one in skipped))}
## Calibration

Simulated cycles become times at {GPU.clock} GHz x {GPU.sustained}, the fitted fraction of the
simulated speed that is sustained. Our kernels without a bias stand in for each of these kernels:

{sources}

{calibration(predicted)}"""
