"""The documentation site can parse docstrings, with every argument listed separately."""

from __future__ import annotations

import logging

from tests.project.test_docs import ROOT


def test_docstrings_parse(caplog):
    import griffe

    package = griffe.load(
        "biased_flash_attn",
        search_paths=[ROOT / "python"],
        docstring_parser="google",
        docstring_options={"warn_missing_types": False},
    )
    caplog.set_level(logging.WARNING, logger="griffe")
    pending, sections = [package], 0
    while pending:
        member = pending.pop()
        if member.is_alias:
            continue
        pending.extend(member.members.values())
        sections += len(member.docstring.parsed) if member.docstring else 0
    assert sections > 100
    assert not caplog.messages
