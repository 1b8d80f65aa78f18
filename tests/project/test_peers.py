"""The documentation shows how many cases of peers' tests are served."""

from __future__ import annotations

from dataclasses import dataclass

from tests.peers import documents
from tests.peers.counting import count, sampled


def test_the_page_has_the_current_numbers():
    page = documents.PAGE.read_text()
    assert documents.with_table(page) == page, "python -m tests.peers.documents writes the page"


def test_every_case_is_counted_once():
    for name, _, cases, served, refused in list(documents.rows())[2:]:
        others = sum(int(part.split(":")[0]) for part in refused.split("; ") if part != "none")
        assert int(cases) == int(served) + others, name


@dataclass(frozen=True)
class Case:
    length: int
    causal: bool
    heads: int
    refused: str = ""


CASES = [Case(n, c, h, "long" * (n > 4)) for n in range(6) for c in (False, True) for h in (1, 2)]


def test_refused_cases_are_counted_by_reason():
    assert count(CASES) == (20, {"long": 4})


def test_samples_contain_every_pair():
    sample = sampled(CASES, "seed", alone="length")
    assert len({(case.causal, case.heads) for case in sample}) == 4
    assert {case.length for case in sample} == set(range(5))
    assert len(sample) < 10


def test_samples_of_many_cases_contain_every_pair():
    many = [Case(n, c, h) for n in range(1000) for c in (False, True) for h in range(5)]
    sample = sampled(many, "seed", alone="length", among=200)
    assert len({(case.causal, case.heads) for case in sample}) == 10
