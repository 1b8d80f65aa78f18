"""The table of what a bias costs in instructions, from the reports of tests/compiled.py.

    python tests/compiled.py 90 64 | python bench/instructions.py

Instructions of a thread in the loop over whole tiles, and their ratio to those without a bias.
Counts, not times: nothing has run.
"""

from __future__ import annotations

import json
import sys

FORMS = ("none", "linear", "cumulative", "distance", "log1p_square")
KERNELS = {
    "attn_fwd_kernel": "forward",
    "attn_bwd_dq_kernel": "dQ, with the bias's gradient",
    "attn_bwd_dkv_kernel": "dK and dV, with the bias's gradient",
}


def table(reports: list[dict]) -> list[str]:
    counts = {
        (report["dtype"], report["head_dim"], report["kernel"], report["form"]): report[
            "instructions"
        ]
        for report in reports
    }
    lines = [
        "| kernel | dtype | head_dim | " + " | ".join(FORMS) + " |",
        "|---" * (3 + len(FORMS)) + "|",
    ]
    for dtype, head_dim, kernel in dict.fromkeys(key[:3] for key in counts):
        if kernel not in KERNELS:
            continue
        none = counts[dtype, head_dim, kernel, "none"]
        cells = [counts[dtype, head_dim, kernel, form] for form in FORMS]
        shown = [f"{count} ({count / none:.2f})" for count in cells]
        lines.append(f"| {KERNELS[kernel]} | {dtype} | {head_dim} | {' | '.join(shown)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table([json.loads(line) for line in sys.stdin])))
