"""The table of docs/peers.md: how many cases of each peer's tests are served.

python -m tests.peers.documents    writes it
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from .counting import count

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "peers.md"
BEGIN, END = "<!-- Written by tests/peers/documents.py -->", "<!-- End -->"


def rows() -> Iterator[tuple[str, ...]]:
    """A peer, its tests, the numbers of all cases and of served ones, and why others are refused.

    Each test module of this folder describes one peer, or some tests of one: PEER has its name and
    its tests, and CASES the cases.
    """
    yield "peer", "its tests", "cases", "served", "refused, and why"
    yield ("---", "---", "--:", "--:", "---")
    names = (f".{path.stem}" for path in FOLDER.glob("test_*.py"))
    modules = [importlib.import_module(name, __package__) for name in names]
    for module in sorted(modules, key=lambda module: module.PEER[0].lower()):
        (name, tests), (served, reasons) = module.PEER, count(module.CASES)
        refused = "; ".join(f"{n}: {reason}" for reason, n in sorted(reasons.items()))
        yield name, f"`{tests}`", str(len(module.CASES)), str(served), refused or "none"


def with_table(page: str) -> str:
    """The page with the table of these tests."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{PAGE} has no lines {BEGIN!r} and {END!r}")
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows())
    return f"{before}{begin}\n\n{table}\n{end}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
