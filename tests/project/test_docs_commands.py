"""The commands of the documentation print what is shown below them."""

from __future__ import annotations

import contextlib
import io
import re
import shlex

import pytest
from click.testing import CliRunner

from biased_flash_attn.cli import main

from .test_docs import DOCS, assert_same_output

BLOCK = re.compile(r"^```console\n\$ (.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAM = ["python", "-m", "biased_flash_attn"]
SLOW = {"published"}  # every row of three papers, with seven predictors


def commands() -> list:
    """The arguments and the lines that are shown, of every command of every page."""
    found = []
    for page in sorted(DOCS.rglob("*.md")):
        for place, block in enumerate(BLOCK.findall(page.read_text())):
            arguments, lines = split(block)
            marks = [pytest.mark.slow] if SLOW.intersection(arguments) else []
            found.append(pytest.param(arguments, lines, id=f"{page.stem}-{place}", marks=marks))
    return found


def split(block: str) -> tuple[list[str], list[str]]:
    """A command, which ends where its quotes are closed, and the lines after it."""
    lines = block.splitlines()
    for end in range(1, len(lines) + 1):
        with contextlib.suppress(ValueError):  # a quote is open
            return shlex.split("\n".join(lines[:end])), lines[end:]
    raise ValueError(block)


@pytest.mark.parametrize(("arguments", "lines"), commands())
def test_commands_print_what_is_shown(arguments, lines, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = iter(output(arguments).splitlines())
    assert lines
    for line in lines:
        assert any(same(other, line) for other in printed), f"{line} is not printed, or not here"


def output(arguments: list[str]) -> str:
    if arguments[:2] == ["python", "-c"]:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(arguments[2], {})
        return printed.getvalue()
    assert arguments[: len(PROGRAM)] == PROGRAM
    result = CliRunner().invoke(main, arguments[len(PROGRAM) :], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def same(printed: str, shown: str) -> bool:
    """Whether two lines have the same words; columns of tables may have other widths."""
    try:
        assert_same_output(printed, shown)
    except AssertionError:
        return False
    return True


def test_the_page_of_disagreements_has_a_command_for_each():
    text = (DOCS / "laboratory" / "disagreements.md").read_text()
    sections = text.split("\n## ")[1:]
    assert len(sections) == 7
    assert all(len(BLOCK.findall(section)) == 1 for section in sections)


@pytest.mark.parametrize("shown", ["fit 2", "fit 1 2", "other 1"])
def test_lines_that_differ_are_detected(shown):
    assert same("fit 1", "fit   1")
    assert not same("fit 1", shown)
