"""Tables of estimates, as text and as the documents in bench/results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import triton

from bench.machine_code.compiled import GROUP, PAGE_SIZE, VECTORS

from . import decoding, tiles, times
from .calibration import FRACTION, Prediction, stated_error
from .gpu import Gpu
from .iteration import SEGMENTS
from .kernels import Kernel, build
from .pipes import PIPES
from .published import SOURCES, Row

FORMS = {
    "none": "none",
    "linear": "linear: ALiBi",
    "cumulative": "cumulative: forget gate",
    "cumulative-gain": "with gain: CABLE",
    "distance": "distance",
    "log1p_square-gain": "with outer function",
    "dense": "dense",
    "normalized": "normalized: FIRE",
    "relative": "relative: band",
    "relative_last": "relative_last: DeBERTa",
}
NAMES = {
    tiles.FORWARD: "forward",
    tiles.DQ: "dQ",
    tiles.DKV: "dK, dV",
    tiles.TABLE: "dtable",
    tiles.RELATIVE: "dtables",
}
FORMS_WITH = {
    tiles.TABLE: ("distance", "normalized"),
    tiles.RELATIVE: ("relative", "relative_last"),
}
TOKENS = 16384
CHANNELS = 2048  # of all heads
# Below this fraction of the cycles, no unit is considered the bottleneck of a loop.
BOUND = 0.7


@dataclass(frozen=True)
class Line:
    """A kernel of a training step and its estimate."""

    kernel: Kernel
    problem: times.Problem
    cells: tuple[str, ...]
    milliseconds: float


def committed_problem(head_dim: int) -> times.Problem:
    return times.Problem(1, CHANNELS // head_dim, TOKENS, head_dim)


def lines(gpu: Gpu, form: str, problem: times.Problem) -> list[Line]:
    """The kernels of both directions; a bias with parameters is trained."""
    names = [name for name in NAMES if form in FORMS_WITH.get(name, FORMS)]
    trained = form != "none"
    kernels = (build(gpu.arch, name, form, problem.head_dim, trained=trained) for name in names)
    return [_line(one, gpu, problem) for one in kernels]


def _line(kernel: Kernel, gpu: Gpu, problem: times.Problem) -> Line:
    simulated, units = times.whole_tiles(kernel, gpu)
    unit = times.critical(units)
    fraction = units[unit] / simulated
    blocks = kernel.blocks_at_once(gpu)
    found = times.estimate(kernel, gpu, problem)
    bound = unit if fraction >= BOUND else f"latency, then {unit}"
    bound = "memory" if found.bound_by_memory else f"{bound} ({fraction:.0%})"
    cells = (
        *(FORMS[kernel.form], str(kernel.head_dim), NAMES[kernel.name]),
        f"{kernel.block_m} x {kernel.block_n}, {kernel.warps}, {kernel.stages}",
        *(str(blocks), f"{times.repeated_products(kernel):.2f}"),
        *(f"{units[pipe]:.0f}" for pipe in PIPES),
        *(f"{simulated:.0f}", bound, f"{found.milliseconds:.2f}"),
    )
    return Line(kernel, problem, cells, found.milliseconds)


KERNEL_COLUMNS = (
    *("bias", "head_dim", "kernel", "tile, warps, stages", "blocks", "products"),
    *PIPES,
    *("simulated", "bound by", "ms"),
)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def totals(gpu: Gpu, found: Sequence[Line]) -> list[tuple[str, ...]]:
    """Both directions for each bias and head_dim, in TFLOP/s and relative to no bias."""
    spent: dict[tuple[str, times.Problem], list[float]] = {}  # forward and backward
    for line in found:
        both = spent.setdefault((line.kernel.form, line.problem), [0.0, 0.0])
        both[line.kernel.name != tiles.FORWARD] += line.milliseconds
    for (form, problem), both in spent.items():
        delta = build(gpu.arch, tiles.DELTA, form, problem.head_dim, trained=form != "none")
        both[1] += times.estimate(delta, gpu, problem).milliseconds
        both[1] += times.clearing(form, gpu, problem)
    rows = []
    for (form, problem), both in spent.items():
        row = [FORMS[form], str(problem.head_dim)]
        without = spent.get(("none", problem), [math.nan] * 2)
        for time, time_without, flops in zip(both, without, (1, times.BACKWARD), strict=True):
            rate = flops * problem.flops / time * 1e-9
            row += [f"{time:.2f}", f"{rate:.0f}", f"{time / time_without:.2f}"]
        rows.append(tuple(row))
    return rows


TOTAL_COLUMNS = (
    *("bias", "head_dim", "forward, ms", "TFLOP/s", "of no bias"),
    *("backward, ms", "TFLOP/s", "of no bias"),
)


DECODING_COLUMNS = ("bias", "head_dim", "parts", "ms", "GB/s", "of the memory bound")


def steps(gpu: Gpu, found: Iterable[decoding.Step]) -> list[tuple[str, ...]]:
    return [
        (
            *(FORMS[one.form], str(one.problem.head_dim), str(one.parts)),
            *(f"{one.milliseconds:.4f}", f"{one.rate:.0f}", f"{one.rate / gpu.hbm:.0%}"),
        )
        for one in found
    ]


_RANK_OF_BAND, *_ = VECTORS["relative"]
_RANK_OF_BOTH, _, _COLUMNS = VECTORS["relative_last"]
ASSUMPTIONS = f"""The forms differ in what is assumed about their parameters:

- distance: polynomials fit the table from distance {tiles.FAR} on.
- dense: a float32 number per pair, whose gradient is stored by dQ, after memory for all pairs has
  been set to 0. The backward pass includes that time. Both need 8 H N² bytes, which is more than
  some GPUs have. Their reads and writes take as long as the rate of the memory permits or as the
  kernel takes otherwise, whichever is longer.
- normalized: the values of a tile are in {SEGMENTS} segments of the function, and sums of gradients
  are over {SEGMENTS} segments.
- relative: one term of rank {_RANK_OF_BAND}, for {tiles.BAND} distances. Tiles beyond them have no
  bias.
- relative_last: both terms, of rank {_RANK_OF_BOTH}. Their tables of {_COLUMNS} distances
  continue, so that all tiles have a bias.

What PyTorch does before and after the kernels is not included, such as converting operands and
adding up the partial sums of gradients of tables.
"""


def calibration(found: Iterable[Prediction]) -> str:
    rows = []
    for one in found:
        row = one.row
        flops = times.Problem(row.batch, row.heads, row.n, row.head_dim, row.causal).flops
        flops *= (times.BACKWARD if row.backward else 1) * 1e-9
        sizes = row.configs[0]
        size = f"{sizes.block_m} x {sizes.block_n}, {sizes.num_warps}, {sizes.num_stages}"
        rows.append(
            (
                *(row.source, "backward" if row.backward else "forward"),
                f"{'causal' if row.causal else 'full'}, {row.batch} x {row.heads} x {row.n}",
                *(str(row.head_dim), size if len(row.configs) == 1 else "searched"),
                *(f"{flops / row.milliseconds:.0f}", f"{flops / one.milliseconds:.0f}"),
                *(f"{one.error:+.0%}", _use(row)),
            )
        )
    columns = ("kernel", "pass", "B x H x N", "head_dim", "tile, warps, stages")
    return table((*columns, "published TFLOP/s", "estimated", "error in time", ""), rows)


def _use(row: Row) -> str:
    if row.is_alike:
        return "fitted" if row.is_fitted else "predicted"
    return "predicted, not alike"


def _unchecked(predicted: Sequence[Prediction]) -> str:
    if any(one.row.backward for one in predicted):
        return ""
    return " None of them is of a backward pass, so the error of those is not known."


def document(
    gpu: Gpu,
    found: Sequence[Line],
    decoded: Sequence[decoding.Step],
    predicted: Sequence[Prediction],
) -> str:
    error, within = stated_error(predicted), f"{FRACTION:.0%}"
    sources = "\n".join(
        f"- {name}: {text}."
        for name, text in SOURCES.items()
        if any(one.row.source == name for one in predicted)
    )
    shape = f"batch 1, {TOKENS} tokens, {CHANNELS} channels in heads of head_dim"
    return f"""# Estimated speed of the Triton kernels on an {gpu.name}

**Estimates, not measurements: none of these kernels has been timed.** The error of each is
±{error:.0%}: {within} of the published timings of alike kernels that were predicted and not fitted
lie within it (see the last table).{_unchecked(predicted)}

Made with Triton {triton.__version__} by `python -m bench.estimates.run`, for bfloat16, causal
attention, {shape}, biases trained.

## Both directions

By convention, a forward pass takes 4 B H N² D flops, halved where it is causal, and a backward pass
2.5 times as many, so the products that dQ and dK, dV both compute count once.

{ASSUMPTIONS}
{table(TOTAL_COLUMNS, totals(gpu, found))}
## Kernels

Of the loop over whole tiles: block_m x block_n, warps and stages; blocks at once on a
multiprocessor; multiply-adds over those of the formula, which are more where a bias takes part in
products or a tile has too few rows for all warps to share; cycles for which these blocks occupy
each unit in one pass; and the cycles that the simulation takes for it. Where the busiest unit is
busy for less than {BOUND:.0%} of them, the loop is bound by latency that nothing hides.

{table(KERNEL_COLUMNS, (line.cells for line in found))}
## Decoding

One new token attends to a cache of {TOKENS} tokens in pages of {PAGE_SIZE}, where {GROUP} query
heads share a key head and no keys are skipped. A sequence is processed in parts, which are then
merged. Bytes are those of the keys, the values and what the bias has for each key; the memory bound
is the time in which the memory reads them. The latency of the memory beyond that of the L2 cache,
and the launch of both kernels, are not included.

{table(DECODING_COLUMNS, steps(gpu, decoded))}
## Calibration

Simulated cycles become times at {gpu.clock} GHz x {gpu.sustained}, the fitted fraction of the
simulated speed that is sustained, and a fence takes {gpu.fence} cycles, which is fitted too. Our
kernel without a bias stands in for each of these kernels, with its block sizes:

{sources}

Rows of one kernel with the same block sizes differ only in their lengths and masks, so they are not
independent of each other.

{calibration(predicted)}"""
