"""What the README, docs and the plots show of the latest run of `make bench`.

python -m bench.reports.documents    writes it
"""

from __future__ import annotations

import re

from bench import ROOT
from bench.reports import bounds, latest, plots
from biased_flash_attn.integrations.transformers.families import FAMILIES

README, DOCS = ROOT / "README.md", ROOT / "docs"
PERFORMANCE, TRANSFORMERS = DOCS / "performance.md", DOCS / "transformers.md"
COST = DOCS / "laboratory" / "cost.md"
AGAINST_SDPA = "sandwich against SDPA with a dense mask"
AGAINST_PLAIN = "kerple_log against plain PyTorch with autograd"
MEMORY = "peak memory beyond inputs, outputs and gradients at N = 16384, kerple_log"


def readme_with_results(text: str) -> str:
    """The README with the times and the memory in its comparison."""
    for dtype in ("float32", "bfloat16"):
        begin, end = rf"(\| time, 4096 tokens, {dtype} \| )", r"( \| no backward pass on CPUs \|)"
        text = _replaced(begin, " | ".join(_times(dtype)), end, text)
    size = latest.row(MEMORY, "float32").measured
    return _replaced(r"(\| O\(N\); )", f"{size:.0f} MiB", r"( for the whole call \|)", text)


def _times(dtype: str) -> list[str]:
    """The cells of our times and those of SDPA and of plain PyTorch."""
    works = AGAINST_SDPA, AGAINST_PLAIN
    ours, others = zip(*(latest.seconds(work, dtype) for work in works), strict=True)
    ratios = [latest.row(work, dtype).measured for work in works]
    mine = " to ".join(dict.fromkeys(_two_digits(x) for x in sorted(ours)))
    return [
        f"{mine} s",
        *(f"{_two_digits(s)} s ({_two_digits(r)}x)" for s, r in zip(others, ratios, strict=True)),
    ]


def _two_digits(x: float) -> str:
    return f"{x:#.2g}" if x < 9.95 else f"{x:.0f}"


def performance_with_results(text: str) -> str:
    """docs/performance.md with the tables, and what bounds the ratios in them."""
    tables = latest.path().with_suffix(".md").relative_to(ROOT)
    text = _replaced(r'(--8<-- ")', str(tables), r'(")', text)
    text = _replaced(r"(at most )", f"{bounds.peak() / 1e9:.0f}", r"( billion multiply-adds)", text)
    text = _replaced(r"(no bias reaches )", f"{bounds.reached():.0f}", r"( %)", text)
    for name, cells in bounds.rows().items():
        text = _replaced(rf"(\| {name} \| )", " | ".join(cells), r"( \|\n)", text)
    return text


def transformers_with_results(text: str) -> str:
    """docs/transformers.md with the table of supported models, and the results of models."""
    tables = latest.path(latest.MODELS).with_suffix(".md").relative_to(ROOT)
    text = _replaced(r'(--8<-- ")', str(tables), r'(")', text)
    heading = "model | its bias | what is served | attention | memory | measured with"
    lines = [f"| {heading} |", 6 * "|---" + "|"]
    for family in FAMILIES:
        cells = (family.name, family.bias, family.served, *_measured(family.name))
        lines.append(f"| {' | '.join(cells)} |")
    return _replaced(r"(newest tested one\.\n\n)", "\n".join(lines), r"(\n\n)", text)


def cost_with_results(text: str) -> str:
    """docs/laboratory/cost.md with the results of position schemes."""
    tables = latest.path(latest.SCHEMES).with_suffix(".md").relative_to(ROOT)
    return _replaced(r'(is not known\.\n\n--8<-- ")', str(tables), r'(")', text)


def _measured(family: str) -> tuple[str, str, str]:
    """How many times faster and in how much of the memory its attention runs, and in what model."""
    for time in latest.rows(latest.MODELS).values():
        name, _, rest = time.work.partition(": ")
        if name == family:
            shape = rest.rpartition(", against ")[0]
            memory = latest.rows(latest.MODELS)[f"peak memory of {name}: {shape}", time.dtype]
            return f"{_two_digits(time.measured)}x", f"{_two_digits(memory.measured)} %", shape
    raise ValueError(f"the attention of {family} was not measured")


def _replaced(begin: str, by: str, end: str, text: str) -> str:
    found, count = re.subn(
        f"{begin}.*?{end}", lambda match: match[1] + by + match[2], text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{begin!r} to {end!r} occurs {count} times; it must occur once")
    return found


if __name__ == "__main__":
    README.write_text(readme_with_results(README.read_text()))
    PERFORMANCE.write_text(performance_with_results(PERFORMANCE.read_text()))
    TRANSFORMERS.write_text(transformers_with_results(TRANSFORMERS.read_text()))
    COST.write_text(cost_with_results(COST.read_text()))
    plots.write(plots.FOLDER)
