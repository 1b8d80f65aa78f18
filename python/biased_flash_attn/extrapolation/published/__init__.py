"""The perplexities that the papers publish, at every length and for every scheme of their tables.

There is one file per paper. `rows` reads them all.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files

PAPERS = ("chi_2023", "qin_2023", "veisi_2025")


@dataclass(frozen=True)
class Row:
    """The perplexities of one model.

    Attributes:
        paper: authors and year. table: its number there.
        dataset: the text. model: its name in the paper, or "" without a name.
        protocol: which tokens are scored, as far as the paper says.
        layers, heads, train_length: of the model, as the paper states them.
        label: what the paper calls the scheme, or the setting of a column.
        scheme: a name of `nn.positions` for it.
        perplexity: by length, without the lengths that have a dash in the paper.
        deviation: by length, the number after ± where there is one.
    """

    paper: str
    table: str
    dataset: str
    model: str
    protocol: str
    layers: int
    heads: int
    train_length: int
    label: str
    scheme: str
    perplexity: dict[int, float]
    deviation: dict[int, float]


def rows() -> list[Row]:
    """All rows, in the order of the papers, their tables, and the columns of these."""
    found = []
    for name in PAPERS:
        record = json.loads(files(__package__).joinpath(f"{name}.json").read_text("utf-8"))
        for table in record["tables"]:
            shared = {k: v for k, v in table.items() if k not in ("lengths", "rows")}
            for row in table["rows"]:
                found.append(
                    Row(
                        paper=record["paper"],
                        **{"model": "", **shared},
                        label=row["label"],
                        scheme=row["scheme"],
                        perplexity=_printed(table["lengths"], row["perplexity"]),
                        deviation=_printed(table["lengths"], row.get("deviation", [])),
                    )
                )
    return found


def _printed(lengths: list[int], values: list[float | None]) -> dict[int, float]:
    found = zip(lengths, values, strict=bool(values))
    return {length: value for length, value in found if value is not None}
