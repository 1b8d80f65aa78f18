"""The table of what a bias costs in instructions.

    python bench/instructions.py 90 > bench/results/instructions-sm_90.md

Instructions of a thread for a pair of query and key, in the loop over whole tiles, of tables over
far ones, and their ratio to those without a bias. Counts, not times: nothing has run.
"""

from __future__ import annotations

import os
import sys

import torch
import triton
from triton.runtime import driver

import compiled

WIDTHS = (64, 128)
FORMS = {
    "none": "none",
    "linear": "linear: ALiBi",
    "cumulative": "cumulative: forget gate",
    "cumulative-gain": "with gain: CABLE",
    "distance": "distance, far",
    "log1p_square-gain": "with outer function",
}
FORWARD, *BACKWARD = "attn_fwd_kernel", "attn_bwd_dq_kernel", "attn_bwd_dkv_kernel"


def a_pair(form: str, width: int, bias_gradient: bool) -> dict[str, float]:
    """Instructions of each kernel for a pair."""
    kernels = compiled.compiled(form, torch.bfloat16, width, bias_gradient, (FORWARD, *BACKWARD))
    return {one.kernel: one.instructions for one in kernels}


def table() -> list[str]:
    columns = ["kernels", "head_dim", *FORMS.values()]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for width in WIDTHS:
        plain = [a_pair(form, width, False) for form in FORMS]
        trained = [a_pair(form, width, True) for form in FORMS]
        lines += [
            row("forward", width, [x[FORWARD] for x in plain]),
            row("dQ", width, [x[BACKWARD[0]] for x in plain]),
            row("dK and dV", width, [x[BACKWARD[1]] for x in plain]),
            row("backward", width, [sum(x[k] for k in BACKWARD) for x in plain]),
            row("backward, bias trained", width, [sum(x[k] for k in BACKWARD) for x in trained]),
        ]
    return lines


def row(kernels: str, width: int, instructions: list[float]) -> str:
    none = instructions[0]
    cells = [f"{one:.1f} ({one / none:.2f})" for one in instructions]
    return f"| {kernels} | {width} | {' | '.join(cells)} |"


def main(arch: str) -> None:
    driver.set_active(compiled.Processor(int(arch)))
    print(f"# Instructions of the Triton kernels on sm_{arch}\n")
    print(f"Made with Triton {triton.__version__} by bench/instructions.py, for bfloat16.\n")
    print("\n".join(__doc__.split("\n\n")[2].splitlines()))
    print("The gradient of a table takes a pass of its own, which is not counted.\n")
    print("\n".join(table()))


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main(*sys.argv[1:])
