"""The table of the instructions that a bias costs.

    python -m bench.machine_code.compiled 90 64 128 > compiled.txt
    python -m bench.machine_code.instructions < compiled.txt > table.md

It contains instructions per thread and pair of query and key in the loop over whole tiles (for
tables, over distant ones), and their ratio to those without a bias. These are not times.
"""

from __future__ import annotations

import json
import sys

FORMS = {
    "none": "none",
    "linear": "linear: ALiBi",
    "cumulative": "cumulative: forget gate",
    "cumulative-gain": "with gain: CABLE",
    "distance": "distance, far",
    "log1p_square-gain": "with outer function",
}
FORWARD, DQ, DKV = "attn_fwd_kernel", "attn_bwd_dq_kernel", "attn_bwd_dkv_kernel"
# The kernels of each row, and whether the bias is trained.
ROWS = {
    "forward": ([FORWARD], False),
    "dQ": ([DQ], False),
    "dK and dV": ([DKV], False),
    "backward": ([DQ, DKV], False),
    "backward, bias trained": ([DQ, DKV], True),
}


def instructions(kernels: list[dict]) -> dict[tuple[str, int], dict[str, float]]:
    """The instructions per pair, by row and head_dim, then by form."""
    a_pair = {}
    for one in kernels:
        if one["dtype"] == "bfloat16":
            # The forward pass does not depend on whether the bias is trained.
            trained = one["bias_gradient"] and one["kernel"] != FORWARD
            key = one["kernel"], one["head_dim"], trained, one["form"]
            a_pair[key] = one["instructions"]
    forms = [form for form in FORMS if any(form == one["form"] for one in kernels)]
    return {
        (row, width): {
            form: sum(a_pair[kernel, width, trained, form] for kernel in names) for form in forms
        }
        for width in sorted({one["head_dim"] for one in kernels})
        for row, (names, trained) in ROWS.items()
    }


def cells(kernels: list[dict]) -> dict[tuple[str, int], dict[str, str]]:
    """The cells of the table by row and head_dim, then by column title."""
    return {
        key: {FORMS[form]: f"{n:.1f} ({n / counts['none']:.2f})" for form, n in counts.items()}
        for key, counts in instructions(kernels).items()
    }


def read(table: str) -> dict[tuple[str, int], dict[str, str]]:
    """The cells of an existing document, as returned by `cells`."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    (_, _, *titles), *rows = lines
    return {(name, int(width)): dict(zip(titles, row, strict=True)) for name, width, *row in rows}


def document(kernels: list[dict]) -> str:
    arch, triton = (kernels[0][name] for name in ("arch", "triton"))
    columns = ["kernels", "head_dim", *FORMS.values()]
    lines = [
        f"# Instructions of the Triton kernels on sm_{arch}\n",
        f"Made with Triton {triton} by `bench.machine_code.instructions`, for bfloat16.\n",
        __doc__.split("\n\n")[2].rstrip(),
        "The gradient of a table takes a pass of its own, which is not counted.\n",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for (row, width), in_row in cells(kernels).items():
        lines.append(f"| {row} | {width} | {' | '.join(in_row.values())} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document([json.loads(line) for line in sys.stdin]))
