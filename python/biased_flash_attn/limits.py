"""Every number that two languages have to agree on, defined here and nowhere else.

The C++ kernels are built with a header that CMake generates from this file, and the Triton kernels
import it. An extension that was built with other numbers is refused when it is imported.
"""

from __future__ import annotations

# Consecutive queries that a plan treats alike.
PLAN_QUERIES = 128
# Keys of a tile. Plans begin and end with one, and the keys of a cache are known tile by tile.
TILE_KEYS = 64
# The past keys nearest to a query, which it always takes; their sum bounds its lse from below.
NEAR_KEYS = 128
# Distances of a table of which a cache keeps the largest entry.
PEAK_DISTANCES = 64
# Up to this size the kernels hold the running sums of a tile of keys in one float32.
LARGEST_SUM = 64
# A logit of size s is off by no more than
#     ROUNDING_FLOOR + ROUNDING * (ROUNDING_PER_CHANNEL * head_dim + ROUNDING_CONSTANT) * (1 + s),
# whatever float32 products, sums and fast exponentials do. The proof of skipping rests on it.
ROUNDING = 2.0**-23
ROUNDING_FLOOR = 2.0**-10
ROUNDING_PER_CHANNEL = 4
ROUNDING_CONSTANT = 256


def numbers() -> dict[str, int | float]:
    """All of them by name."""
    return {name: x for name, x in globals().items() if name.isupper()}


def rounding_of_logits(head_dim: int) -> float:
    """By how much a logit may be off, relative to 1 + its size."""
    return ROUNDING * (ROUNDING_PER_CHANNEL * head_dim + ROUNDING_CONSTANT)


def header() -> str:
    """The C++ header, and the list by which the extension reports what it was built with."""
    lines = [
        f"constexpr {'int64_t' if isinstance(x, int) else 'double'} {name} = {x!r};"
        for name, x in numbers().items()
    ]
    entries = " ".join(f"X({name})" for name in numbers())
    return "\n".join(
        [
            "// Generated from python/biased_flash_attn/limits.py.",
            "#pragma once",
            "",
            "#include <cstdint>",
            "",
            "namespace bfa::limits {",
            *lines,
            "}  // namespace bfa::limits",
            f"#define BFA_EACH_LIMIT(X) {entries}",
            "",
        ]
    )


if __name__ == "__main__":
    print(header(), end="")
