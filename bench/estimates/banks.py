"""Bank conflicts of operands in shared memory, from the addresses in Triton's layouts.

LDSM reads 8 rows of 16 bytes at once. Triton swizzles tiles so that these fall into different
banks: row r stores group g of `vec` elements in the place of group g ^ (r // perPhase % maxPhase).
The layouts do not determine the addresses of other accesses, which are assumed to be free of
conflicts, because Triton arranges its scratch memory to avoid them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

ROWS, CHUNK = 8, 16  # rows that LDSM reads at once, and bytes of each
LINE = 128  # bytes of all banks together


@dataclass(frozen=True)
class Layout:
    """The swizzled layout of a tile whose rows have `row` elements of two bytes."""

    vec: int
    per_phase: int
    max_phase: int
    row: int

    def address(self, row: int, element: int) -> int:
        """The address of an element, in bytes."""
        group, place = divmod(element, self.vec)
        group ^= row // self.per_phase % self.max_phase
        return 2 * (row * self.row + group * self.vec + place)

    def conflicts(self) -> int:
        """The largest number of cycles that 8 rows of a column of 16 bytes take."""
        most = 1
        for first in range(0, ROWS * self.max_phase * self.per_phase, ROWS):
            for element in range(0, self.row, CHUNK // 2):
                addresses = (self.address(first + row, element) for row in range(ROWS))
                banks = Counter(address % LINE // CHUNK for address in addresses)
                most = max(most, *banks.values())
        return most


def layouts(ttgir: str) -> set[Layout]:
    """The layouts of a kernel's half-precision tiles in shared memory."""
    encodings = {}
    swizzled = (
        r"#ttg.swizzled_shared<\{vec = (\d+), perPhase = (\d+), maxPhase = (\d+), order = \[(\d)"
    )
    for name, *numbers in re.findall(rf"(#shared\d*) = {swizzled}", ttgir):
        encodings[name] = tuple(map(int, numbers))
    found = set()
    for rows, columns, name in re.findall(
        r"memdesc<(?:\d+x)?(\d+)x(\d+)x(?:bf|f)16, (#shared\d*),", ttgir
    ):
        if name in encodings:
            vec, per_phase, max_phase, fastest = encodings[name]
            found.add(Layout(vec, per_phase, max_phase, int(columns if fastest else rows)))
    return found
