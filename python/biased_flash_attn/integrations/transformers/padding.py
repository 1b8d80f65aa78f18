"""Hooks by which an encoder computes nothing for padding before and after the tokens.

They are for stacks whose layers other than attention treat each token by itself.
"""

from __future__ import annotations

import inspect

import torch
from transformers import PreTrainedModel

from .token_mask import TokenMask


def arguments(trunk: PreTrainedModel, args: tuple, kwargs: dict) -> dict:
    """The arguments of a forward pass, by name."""
    named = inspect.signature(trunk.forward).bind_partial(*args, **kwargs).arguments
    others = named.pop("kwargs", {})
    return {**named, **others}


def remove(trunk: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """A forward pre-hook: passes on the tokens alone, and a mask with which `restore` undoes it.

    Outputs of every layer are left with their padding.
    """
    given = arguments(trunk, args, kwargs)
    ids, embedded = given.pop("input_ids", None), given.pop("inputs_embeds", None)
    inputs, mask = ids if embedded is None else embedded, given.get("attention_mask")
    every_layer = given.get("output_hidden_states", trunk.config.output_hidden_states)
    if trunk.config.is_decoder or every_layer or given.get("output_attentions"):
        return None
    if (ids is None) == (embedded is None) or mask is None or mask.shape != inputs.shape[:2]:
        return None
    mask = TokenMask.from_keys(mask.to(inputs.device, torch.bool))
    if not mask.has_removable_padding or not mask.tokens.any():
        return None
    mask = mask.unpadded
    # Embeddings may depend on positions.
    embedded = trunk.embed_tokens(ids) if embedded is None else embedded
    embedded = mask.packed.keys.pack(embedded)
    return (), given | {"inputs_embeds": embedded, "attention_mask": mask}


def restore(trunk: PreTrainedModel, args: tuple, kwargs: dict, result):
    """A forward hook: hidden states with padding, which is 0."""
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, TokenMask):
        return result
    states = mask.packed.keys.unpack(result[0])
    if isinstance(result, tuple):
        return states, *result[1:]
    result.last_hidden_state = states
    return result
