"""The files in docs/transformers.md run as they stand, with small models of the same names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations.libraries import cases

PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"
FILES = dict(re.findall(r'^```python title="(.*?)"\n(.*?)^```', PAGE.read_text(), re.M | re.S))
MODELS = {
    "sentence-transformers/all-mpnet-base-v2": cases.save_mpnet,
    "bigscience/bloom-560m": cases.save_bloom,
    "amazon/chronos-t5-small": cases.save_chronos_t5,
    "amazon/chronos-bolt-small": cases.save_chronos_bolt,
}

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("ignore")]


def test_every_model_is_replaced():
    named = re.findall(r'"([\w-]+/[\w-]+)"', "".join(FILES.values()))
    assert set(named) == set(MODELS)


@pytest.mark.parametrize("file", FILES)
def test_file_runs(file, tmp_path, monkeypatch):
    """Libraries prefer a folder of the name to a model on the Hub."""
    monkeypatch.chdir(tmp_path)
    for name, save in MODELS.items():
        if name in FILES[file]:
            save(tmp_path / name)
    exec(compile(FILES[file], file, "exec"), {})
