"""What multiply-adds alone allow a relative bias on a CPU: the ratios of an ideal training step.

python -m bench.reports.bounds    prints multiply-adds per pair and rank, and these ratios
"""

from __future__ import annotations

from bench.common.layer import DIM, HEAD_DIM, HEADS
from bench.reports import latest
from biased_flash_attn.shared_constants import TILE_KEYS

# Sizes of csrc/cpu/arithmetic.h and forms/relative/sheared_products.h, with vectors of AVX-512.
STRIP, GROUP, ROW_GROUP, LANES = 48, 12, 16, 16
LENGTH = 4096
PAIRS = HEADS * LENGTH * (LENGTH + 1) // 2
AT_PEAK = "forward alone, useful FLOP/s against the FMA peak, no bias"


def products(rows: int, width: int) -> dict[str, float]:
    """Multiply-adds per pair and rank of each product of one term, of `rows` factors and `width`
    distances each."""
    wide = -(-(width + ROW_GROUP) // LANES) * LANES
    in_groups = [min(GROUP, rows - row) for row in range(0, rows, GROUP)]
    table = 0
    for column in range(0, rows + width, GROUP):
        columns = min(GROUP, rows + width - column)
        first, end = max(rows - column - columns, 0), min(rows - 1 + width - column, rows)
        table += columns * (end - first)
    return {
        "bias": wide / width,
        "gradient of factors": sum(n * (n + width) for n in in_groups) / (rows * width),
        "gradient of table": table / (rows * width),
    }


def training(rows: int, width: int) -> float:
    """Multiply-adds per pair and rank of a training step: the bias is computed twice."""
    return products(rows, width)["bias"] + sum(products(rows, width).values())


OF_QUERIES, OF_KEYS = (STRIP, TILE_KEYS), (TILE_KEYS, STRIP)


def banded(head_dim: int, rank: int, extent: int) -> float:
    """Multiply-adds of a training step with `BandedRelative` and its linear layer."""
    in_band = HEADS * (LENGTH * extent - extent * (extent - 1) // 2)
    layer = 2 * LENGTH * DIM * HEADS * rank
    return PAIRS * 7 * head_dim + in_band * training(*OF_QUERIES) * rank + layer


def transformer_xl(head_dim: int) -> float:
    """Multiply-adds of a training step with `TransformerXL` and its projection of sinusoids."""
    channels = HEADS * head_dim
    return PAIRS * (7 + training(*OF_QUERIES)) * head_dim + 2 * LENGTH * channels**2


def peak() -> float:
    """The measured multiply-adds per second in float32."""
    _, least = latest.seconds(AT_PEAK)
    return 2 * PAIRS * HEAD_DIM / least


def reached() -> float:
    """How much of it a forward pass without a bias reaches, in percent."""
    return latest.row(AT_PEAK, "float32").measured


def cells(name: str, head_dim: int, multiply_adds: float) -> list[str]:
    """Multiply-adds, their time at the peak, that of plain PyTorch, and the ratios."""
    work = f"{name} against plain PyTorch with autograd, D = {head_dim}"
    least, (_, plain) = multiply_adds / peak(), latest.seconds(work)
    return [
        f"{multiply_adds / 1e9:.1f} billion",
        f"{least:.2f} s",
        f"{plain:.2f} s",
        f"{plain / least:.1f}x",
        f"{latest.row(work, 'float32').measured:.1f}x",
    ]


def rows() -> dict[str, list[str]]:
    """The cells of the table in docs/performance.md after the first one of each row."""
    return {
        "banded, D = 128, R = 16": cells("banded", 128, banded(128, 16, 1024)),
        "transformer_xl, D = R = 64": cells("transformer_xl", 64, transformer_xl(64)),
    }


if __name__ == "__main__":
    for term, size in (("queries", OF_QUERIES), ("keys", OF_KEYS)):
        counts = {name: round(n, 2) for name, n in products(*size).items()}
        print(f"term of {term}: {counts}, training {training(*size):.2f}")
    print(f"peak: {peak() / 1e9:.0f} billion multiply-adds per second")
    for name, found in rows().items():
        print(name, *found, sep=" | ")
