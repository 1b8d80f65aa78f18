"""Releases of transformers: which are known, and what is said of others."""

from __future__ import annotations

import warnings

import pytest

from biased_flash_attn.integrations.transformers import accelerate
from biased_flash_attn.integrations.transformers.interface import refuse
from biased_flash_attn.integrations.transformers.releases import warn_if_untested
from tests.integrations.transformers.cases import inkling2


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


@pytest.mark.parametrize("version", ["5.23.0", "5.24.0", "5.24.7"])
def test_other_releases_are_not_warned_of(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested(version)


def test_paged_caches_are_refused():
    with pytest.raises(NotImplementedError, match=r"^cache is paged, which biased_attention"):
        refuse({"cache": object()})
    refuse({"cache": None})


def test_other_layers_of_inkling_2_are_refused():
    """Later releases move projections, convolutions and norms into modules of their own."""
    model = inkling2()
    del model.model.layers[0].self_attn.k_sconv
    with pytest.raises(NotImplementedError, match=r"of other layers; install 'transformers==5\.23"):
        accelerate(model)
