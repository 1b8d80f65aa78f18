"""Export over ranges of sizes, which no decision on a size may narrow, and compilation ahead of
time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from biased_flash_attn.skipping.plans import MIN_KEYS
from tests.support.layers import CHANNELS, HEADS, MODULES, Attention

# Of PyTorch's own exporter.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
RANGES = ({0: Dim("batch", min=1, max=8), 1: Dim("tokens", min=1, max=4 * MIN_KEYS)},)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "causal"),
    [(name, True) for name in MODULES]
    + [(name, False) for name in ("t5", "fire", "cable", "transformer_xl")],
)
def test_exports_over_ranges(name, causal):
    """From one token, over as many as the bias has heads, to those for which keys are skipped."""
    layer = Attention(name, causal)
    exported = torch.export.export(layer, (torch.randn(2, 50, CHANNELS),), dynamic_shapes=RANGES)
    for batch, tokens in ((1, 1), (3, HEADS), (1, 130), (1, MIN_KEYS + 1)):
        x = torch.randn(batch, tokens, CHANNELS)
        torch.testing.assert_close(exported.module()(x), layer(x), rtol=1e-4, atol=1e-5)


class Layers(nn.Module):
    def __init__(self, names: list[str]):
        super().__init__()
        self.layers = nn.ModuleList(map(Attention, names))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [layer(x) for layer in self.layers]


@pytest.mark.slow  # the C++ compiler takes most of the time
@torch.no_grad()
def test_compiles_ahead_of_time(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layers = Layers(["kerple_log", "cable", "banded"]).eval()
    x = torch.randn(2, 50, CHANNELS)
    exported = torch.export.export(layers, (x,), dynamic_shapes=RANGES)
    package = str(tmp_path / "layers.pt2")
    torch._inductor.aoti_compile_and_package(exported, package_path=package)
    compiled = torch._inductor.aoti_load_package(package)
    for tokens in (50, 7, MIN_KEYS + 1):
        x = torch.randn(1, tokens, CHANNELS)
        for found, exact in zip(compiled(x), layers(x), strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
