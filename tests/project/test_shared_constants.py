"""Numbers that several languages share are those of shared_constants.py in all of them."""

from __future__ import annotations

import importlib

import pytest

from biased_flash_attn import _C, shared_constants
from biased_flash_attn.backends import cpu


def test_the_extension_was_built_with_them():
    assert _C.constants() == shared_constants.numbers()
    assert len(shared_constants.numbers()) > 5


def test_an_extension_that_was_built_with_others_is_refused(monkeypatch):
    monkeypatch.setattr(_C, "constants", lambda: shared_constants.numbers() | {"TILE_KEYS": 32})
    with pytest.raises(ImportError, match="built with other constants"):
        importlib.reload(cpu)


def test_fields_that_the_extension_does_not_know_are_refused():
    with pytest.raises(TypeError, match="missing: element"):
        _C.forward({})
