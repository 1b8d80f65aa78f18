"""The code in the documentation runs, and prints the output shown below it."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest

from biased_flash_attn.biases import NAMED

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# A block with a title is a file, which is not executed here.
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
FENCE = re.compile(r"``` *python(?! title=)")
OUTPUT = re.compile(r"``` *text")
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
    if FENCE.search(page.read_text()) or OUTPUT.search(page.read_text())
]


@dataclass(frozen=True)
class Block:
    """Code, the line of the page before it, and the output shown for it, if any."""

    code: str
    line: int
    printed: str | None


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found[1], text.count("\n", 0, found.start(1)), found[2])
        for found in BLOCK.finditer(text)
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_found(page):
    blocks = blocks_of(page)
    assert len(blocks) == len(FENCE.findall(page.read_text()))
    outputs = [block for block in blocks if block.printed is not None]
    assert len(outputs) == len(OUTPUT.findall(page.read_text()))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_runs_and_prints_the_shown_output(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # torch.compile looks up the names that functions use in their module.
    module = types.ModuleType(f"docs_{page.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for block in blocks_of(page):
        # Errors name the line of the page.
        code = compile("\n" * block.line + block.code, page, "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, vars(module))
        if block.printed is not None:
            assert_same_output(printed.getvalue(), block.printed)


def assert_same_output(printed: str, shown: str) -> None:
    """The same words and whole numbers; others may differ by 5 %, as processors round."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), printed
    values = [[float(x) for x in NUMBER.findall(text)] for text in (printed, shown)]
    assert values[0] == pytest.approx(values[1], rel=0.05), printed
    whole = [tuple(x for x in pair if x.is_integer()) for pair in zip(*values, strict=True)]
    assert all(len(set(pair)) <= 1 for pair in whole), printed


@pytest.mark.parametrize(
    ("printed", "shown"),
    [("3 keys", "4 keys"), ("41.0 keys", "43.0 keys"), ("3 keys", "3 queries"), ("", "3")],
)
def test_differences_are_detected(printed, shown):
    with pytest.raises(AssertionError):
        assert_same_output(printed, shown)


def test_every_bias_of_the_readme_has_a_name_in_the_commands():
    table = (
        (ROOT / "README.md").read_text().partition("[start:biases]")[2].partition("[end:biases]")
    )
    classes = re.findall(r"^\| `(\w+)` \|", table[0], re.MULTILINE)
    assert sorted(classes) == sorted(kind.__name__ for kind in NAMED.values())


@pytest.mark.parametrize("name", NAMED)
def test_every_bias_plot_is_on_one_page(name):
    pages = [page.read_text() for page in (DOCS / "biases").glob("*.md")]
    assert sum(f"(../pictures/{name}.png)" in page for page in pages) == 1
