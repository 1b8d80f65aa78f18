"""The constants that Python, C++ and Triton share.

The C++ kernels are built with a header that CMake generates from this file, the Triton kernels
import it, and the CUDA kernels get theirs as an option of the compiler. Importing an extension that
was built with other values raises an error.
"""

from __future__ import annotations

# Queries per plan tile: consecutive queries with the same key range.
PLAN_QUERIES = 128
# Keys per tile. Key ranges of a plan consist of whole tiles, and a cache keeps bounds per tile.
TILE_KEYS = 64
# The nearest past keys, which are never skipped: their softmax sum is a lower bound on exp(lse).
NEAR_KEYS = 128
# Entries per block of a distance table; a cache keeps the maximum of each block.
PEAK_DISTANCES = 64
# The largest prefix sum, relative to a tile, that the kernels represent by a single float32.
LARGEST_SUM = 64
# Steps saturate at this magnitude, such as those of a closed gate or of a reset between documents.
# No product of q and k competes with it, and float64 sums of thousands of them resolve 1e-6.
LARGEST_STEP = 2.0**20
# Slopes and gains, and the beta of -log(1 + beta^2), saturate at this magnitude: products with sums
# of steps, or with distances, are then finite in float32, and so is the square of beta.
LARGEST_GAIN = 2.0**63
# The error of a logit of magnitude s is at most
#     ROUNDING_FLOOR + ROUNDING * (ROUNDING_PER_CHANNEL * head_dim + ROUNDING_CONSTANT) * (1 + s),
# including products and sums in float32 and fast exponentials. The proof of skipping relies on it.
ROUNDING = 2.0**-23
ROUNDING_FLOOR = 2.0**-10
ROUNDING_PER_CHANNEL = 4
ROUNDING_CONSTANT = 256


def numbers() -> dict[str, int | float]:
    """Returns all constants by name."""
    return {name: x for name, x in globals().items() if name.isupper()}


def rounding_of_logits(head_dim: int) -> float:
    """Returns the bound on the rounding error of a logit, relative to 1 + its magnitude."""
    return ROUNDING * (ROUNDING_PER_CHANNEL * head_dim + ROUNDING_CONSTANT)


def header() -> str:
    """Returns the C++ header, with a list of all constants that the extension reports."""
    lines = [
        f"constexpr {'int64_t' if isinstance(x, int) else 'double'} {name} = {x!r};"
        for name, x in numbers().items()
    ]
    entries = " ".join(f"X({name})" for name in numbers())
    return "\n".join(
        [
            "// Generated from python/biased_flash_attn/shared_constants.py.",
            "#pragma once",
            "",
            "#include <cstdint>",
            "",
            "namespace bfa::constants {",
            *lines,
            "}  // namespace bfa::constants",
            f"#define BFA_EACH_CONSTANT(X) {entries}",
            "",
        ]
    )


if __name__ == "__main__":
    print(header(), end="")
