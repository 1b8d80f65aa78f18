"""Releases of transformers that are newer than the tested ones are warned of."""

from __future__ import annotations

import warnings

import pytest

from biased_flash_attn.integrations.transformers.releases import warn_if_untested


@pytest.fixture(autouse=True)
def _no_earlier_warnings():
    warn_if_untested.cache_clear()


@pytest.mark.parametrize("version", ["5.25.0", "5.25.0.dev0", "6.0"])
def test_a_newer_release_is_warned_of_once(version):
    message = rf"^transformers {version} is newer than 5\.24.*install 'transformers==5\.24\.\*'"
    with pytest.warns(UserWarning, match=message):
        warn_if_untested(version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested(version)


@pytest.mark.parametrize("version", ["5.24.0", "5.24.7"])
def test_other_releases_are_not_warned_of(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested(version)
