"""Estimates the speed of the CUDA kernels on an H100 that need not be present.

    python -m bench.estimates.cuda.run [--head-dim 64 128 256] [--form Linear ...] [--fit]

prints for each kernel the cycles of each unit, its bottleneck, and its estimated time. Nothing is
run: see bench/estimates/cuda. Without --head-dim and --form, it also writes
bench/results/estimates-cuda-sm_90.md. --fit prints the fitted fraction instead.
"""

from __future__ import annotations

import argparse

from bench import RESULTS
from bench.estimates.cuda import calibration, report, skipping

RESULT = RESULTS / "estimates-cuda-sm_90.md"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--head-dim", type=int, nargs="+", choices=report.HEAD_DIMS)
    parser.add_argument("--form", nargs="+", choices=report.FORMS)
    parser.add_argument("--fit", action="store_true")
    options = parser.parse_args()
    if options.fit:
        print(f"sustained: {calibration.fitted_fraction():.3f}")
        return
    found = [
        line
        for head_dim in options.head_dim or report.HEAD_DIMS
        for form in options.form or report.FORMS
        for line in report.lines(form, head_dim)
    ]
    if options.head_dim or options.form:
        print("estimates, not measurements\n")
        print(report.table(report.KERNEL_COLUMNS, (line.cells for line in found)))
        print(report.table(report.TOTAL_COLUMNS, report.totals(found)))
        return
    document = report.document(found, calibration.predictions(), skipping.estimates())
    RESULT.write_text(document)
    print(document)


if __name__ == "__main__":
    main()
