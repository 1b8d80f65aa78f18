"""The committed documents and plots show the latest run of `make bench`."""

from __future__ import annotations

import re

TEXT = re.compile(r"<text[^>]*>([^<]*)</text>")


def test_plots_show_the_latest_results(tmp_path):
    from bench.reports import plots  # and matplotlib, which takes a second

    plots.write(tmp_path)
    drawn = {path.name: TEXT.findall(path.read_text()) for path in tmp_path.iterdir()}
    committed = {path.name: TEXT.findall(path.read_text()) for path in plots.FOLDER.iterdir()}
    assert drawn == committed
    assert all(committed.values())


def test_documents_show_the_latest_results():
    from bench.reports import documents

    for path, with_results in (
        (documents.README, documents.readme_with_results),
        (documents.PERFORMANCE, documents.performance_with_results),
        (documents.TRANSFORMERS, documents.transformers_with_results),
        (documents.COST, documents.cost_with_results),
    ):
        text = path.read_text()
        assert with_results(text) == text, path.name
