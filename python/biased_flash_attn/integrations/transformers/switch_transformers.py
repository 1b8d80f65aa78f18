"""Switch Transformers: T5's table, and an encoder whose mask is dense."""

from __future__ import annotations

from torch import Tensor
from transformers.models.switch_transformers import modeling_switch_transformers

from .t5 import TableOfDistances
from .token_mask import TokenMask


class FusedSwitchTransformersAttention(
    TableOfDistances, modeling_switch_transformers.SwitchTransformersAttention
):
    """The attention layer of Switch Transformers, without a dense bias."""

    trunk = modeling_switch_transformers.SwitchTransformersStack

    def forward(self, hidden_states: Tensor, mask=None, **kwargs):
        if isinstance(mask, Tensor):
            # The encoder's own, (B, 1, 1, N), which is 0 for tokens.
            mask = TokenMask.from_keys(mask[:, 0, 0] == 0)
        return super().forward(hidden_states, mask, **kwargs)
