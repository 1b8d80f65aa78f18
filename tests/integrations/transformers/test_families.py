"""The registry of supported models, and its description in the documentation."""

from __future__ import annotations

from pathlib import Path

import transformers

PAGE = Path(__file__).parents[3] / "docs" / "transformers.md"


def test_the_table_of_the_documentation():
    from biased_flash_attn.integrations.transformers.families import FAMILIES

    rows = [f"| {family.name} | {family.bias} | {family.served} |" for family in FAMILIES]
    table = "\n".join(["| model | its bias | what is served |", "|---|---|---|", *rows])
    assert f"\n{table}\n\n" in PAGE.read_text(), f"the table must be\n{table}"


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
