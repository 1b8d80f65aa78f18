"""The results of experiments on text in the repository."""

from __future__ import annotations

import re

import pytest

from biased_flash_attn.extrapolation.experiment import report
from biased_flash_attn.extrapolation.reproduction import PRESETS
from tests.project.test_docs import ROOT, assert_same_output

from .tables import rows

TEXT = ROOT / "bench" / "results" / "extrapolation"
REPEATED = ROOT / "bench" / "results" / "reproduction"


def test_tables_are_those_of_their_results():
    found = report.markdown(*report.read_report(TEXT / "results.json"))
    assert_same_output(found, (TEXT / "table.md").read_text())


def test_numbers_in_the_documentation_are_those_of_the_tables():
    page = (ROOT / "docs" / "laboratory" / "text.md").read_text().partition("## Results")[2]
    shown = rows(page.partition("![")[0])[1:]
    cells: dict[str, set[str]] = {}
    for scheme, *values in rows((TEXT / "table.md").read_text()):
        cells.setdefault(scheme, {""}).update(values)
    assert len(shown) == 7
    for scheme, *values in shown:
        assert set(values) <= cells[scheme], scheme


@pytest.mark.parametrize("name", PRESETS)
def test_repetitions_are_those_of_their_results(name):
    parts = []
    for settings in PRESETS[name].experiments((0,)):
        path = REPEATED / f"{name}-{settings.train_length}.json"
        stored, results, reference = report.read_report(path)
        assert stored == settings
        parts.append(PRESETS[name].beside(settings, results, reference) + "\n")
    assert "\n".join(parts) == (REPEATED / f"{name}.md").read_text()


def test_numbers_on_the_page_of_repetitions_are_those_of_their_tables():
    page = (ROOT / "docs" / "laboratory" / "papers.md").read_text()
    sections = dict(re.findall(r"^## (.*)\n((?:(?!^## ).*\n)*)", page, re.MULTILINE))
    assert len(sections) == len(PRESETS)
    places = {title.lower().replace(",", "").replace(" ", "-"): title for title in sections}
    for title, text in sections.items():
        # The tables of the section, and of those that it links to.
        linked = [sections[places[place]] for place in re.findall(r"\]\(#(.*?)\)", text)]
        included = re.findall(r'--8<-- "(.*)"', "".join([text, *linked]))
        tables = "".join((ROOT / path).read_text() for path in included)
        shown = re.findall(r"\d+\.\d{3}(?!\d)(?: \[[\d., ]+\])?", " ".join(text.split()))
        assert shown or included == ["bench/results/reproduction/qin-figure-6.md"], title
        assert [x for x in shown if x not in tables] == [], title
