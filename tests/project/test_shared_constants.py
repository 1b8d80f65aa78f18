"""Constants that several languages share equal those of shared_constants.py."""

from __future__ import annotations

import importlib

import pytest

from biased_flash_attn import _C, shared_constants
from biased_flash_attn.backends import cpu


def test_extension_was_built_with_the_same_constants():
    assert _C.constants() == shared_constants.numbers()
    assert len(shared_constants.numbers()) > 5


def test_extensions_built_with_other_constants_are_refused(monkeypatch):
    monkeypatch.setattr(_C, "constants", lambda: shared_constants.numbers() | {"TILE_KEYS": 32})
    with pytest.raises(ImportError, match="built with other constants"):
        importlib.reload(cpu)


def test_missing_arguments_are_refused():
    with pytest.raises(TypeError, match="missing: q"):
        _C.forward({})
