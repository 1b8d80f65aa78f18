"""Estimates the speed of the Triton kernels on GPUs that need not be present.

    python -m bench.estimates.run [--arch 90 80] [--head-dim 64 128] [--form linear ...]
        [--batch B] [--heads H] [--tokens N] [--fit]

prints for each kernel the cycles of each unit, its bottleneck, and its estimated time and error,
and the time of a decoding step. Nothing is run: see bench/estimates. With the problem and forms of
the committed tables, it also writes bench/results/estimates-sm_90.md and -sm_80.md. --fit prints
the result of the calibration instead.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import product

from tqdm import tqdm

from bench import RESULTS
from bench.estimates import calibration, decoding, report
from bench.estimates.gpu import GPUS, Gpu

WIDTHS = (64, 128)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", type=int, nargs="+", choices=GPUS, default=list(GPUS))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=WIDTHS)
    parser.add_argument("--form", nargs="+", choices=report.FORMS)
    parser.add_argument("--batch", type=positive)
    parser.add_argument("--heads", type=positive, help="by default of 2048 channels in total")
    parser.add_argument("--tokens", type=positive)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    for arch in options.arch:
        if options.fit:
            print_fit(GPUS[arch])
        else:
            print_estimates(GPUS[arch], options)


def positive(text: str) -> int:
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a positive integer")


def print_fit(gpu: Gpu) -> None:
    print(f"{gpu.name}: fence, sustained, spread of logarithmic errors")
    for fitted, spread in calibration.fit(gpu):
        print(f"{fitted.fence:4} {fitted.sustained:.3f} {spread:.3f}", flush=True)


def print_estimates(gpu: Gpu, options: argparse.Namespace) -> None:
    shipped = [report.committed_problem(width) for width in options.head_dim or WIDTHS]
    given = {"batch": options.batch, "heads": options.heads, "n": options.tokens}
    given = {name: number for name, number in given.items() if number}
    problems = [replace(problem, **given) for problem in shipped]
    found, decoded = [], []
    for problem, form in tqdm(list(product(problems, options.form or report.FORMS)), gpu.name):
        found += report.lines(gpu, form, problem)
        decoded.append(decoding.step(gpu, form, problem))
    if given or options.head_dim or options.form:
        print(f"{gpu.name}: estimates, not measurements\n")
        print(report.table(report.KERNEL_COLUMNS, (line.cells for line in found)))
        print(report.table(report.TOTAL_COLUMNS, report.totals(gpu, found)))
        print(report.table(report.DECODING_COLUMNS, report.steps(gpu, decoded)))
        return
    document = report.document(gpu, found, decoded, calibration.predictions(gpu))
    (RESULTS / f"estimates-sm_{gpu.arch}.md").write_text(document)
    print(document)


if __name__ == "__main__":
    main()
