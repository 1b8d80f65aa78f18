"""The registry of supported models."""

from __future__ import annotations

import transformers


def subclasses(kind: type) -> set[type]:
    return {x for child in kind.__subclasses__() for x in (child, *subclasses(child))}


def test_every_fused_layer_is_registered():
    from biased_flash_attn.integrations.transformers.families import FUSED
    from biased_flash_attn.integrations.transformers.layer import FusedLayer

    with_trunk = {kind for kind in subclasses(FusedLayer) if hasattr(kind, "trunk")}
    assert set(FUSED.values()) == with_trunk
    for own, fused in FUSED.items():
        assert own.__module__.startswith("transformers.models."), fused
        assert issubclass(fused.trunk, transformers.PreTrainedModel)
        assert fused.trunk.__module__ == own.__module__
