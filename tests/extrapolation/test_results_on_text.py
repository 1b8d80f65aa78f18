"""The results of experiments on text in the repository."""

from __future__ import annotations

import re

import pytest
import torch

from biased_flash_attn.extrapolation.agreement import rank_correlation
from biased_flash_attn.extrapolation.experiment import report
from biased_flash_attn.extrapolation.experiment.uncertainty import Sample
from biased_flash_attn.extrapolation.reproduction import PRESETS
from biased_flash_attn.extrapolation.reproduction.preset import scaled
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
        prose = " ".join(text.split())
        shown = re.findall(r"\d+\.\d{3}(?!\d)(?: \[[\d., ]+\])?", prose)
        shown += re.findall(r"correlation of (\d\.\d\d)", prose)
        assert shown, title
        assert [x for x in shown if x not in tables] == [], title


def test_schemes_that_lose_nothing_decide_the_rank_correlation_of_table_1():
    table = PRESETS["chi-table-1"]
    _, results, reference = report.read_report(REPEATED / "chi-table-1-64.json")
    found = {}  # of rows with the same numbers in the paper, the first one
    for row in table.rows():
        losses = [report.nats(results[scaled(row.scheme)], n) for n in (1024, 64)]
        here = report.ratio(Sample(reference.blocks), *losses).mean
        found.setdefault(
            tuple(row.perplexity.items()), (here, row.perplexity[8192] / row.perplexity[512])
        )
    here, paper = torch.tensor(list(found.values()), dtype=torch.float64).T
    equal = (here - 1).abs() < 0.0003
    assert equal.sum() == 8
    low, ties, high = (  # the order of these eight is the reverse of that of the paper, none, or it
        rank_correlation(torch.where(equal, 1 + scale * paper, here), paper)
        for scale in (-1e-6, 0, 1e-6)
    )
    page = " ".join((ROOT / "docs" / "laboratory" / "papers.md").read_text().split())
    stated = f"is between {low:.2f} and {high:.2f}. If they count as equal, it is {ties:.2f}."
    assert stated in page
