"""What the tests of commands share."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from biased_flash_attn.cli import main


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs a command in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(main, arguments)


@pytest.fixture
def pictures():
    """The module, imported here with matplotlib, which takes a second."""
    from biased_flash_attn.extrapolation import pictures

    return pictures
