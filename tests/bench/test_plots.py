"""The committed plots show the committed results."""

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
