"""`accelerate`: replaces the attention layers of a model in place."""

from __future__ import annotations

import copy
import inspect

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from .bloom import FusedBloomAttention
from .falcon import FusedFalconAttention
from .inkling import (
    FusedInkling2FullAttention,
    FusedInkling2SlidingAttention,
    FusedInklingAttention,
)
from .interface import NAME, refuse
from .mpt import FusedMptAttention
from .t5 import FusedMT5Attention, FusedT5Attention, FusedUMT5Attention

# The fused layer for each attention layer of transformers.
_FUSED = {
    fused.__bases__[-1]: fused
    for fused in (
        FusedBloomAttention,
        FusedMptAttention,
        FusedFalconAttention,
        FusedT5Attention,
        FusedMT5Attention,
        FusedUMT5Attention,
        FusedInklingAttention,
        FusedInkling2SlidingAttention,
        FusedInkling2FullAttention,
    )
}
_SUPPORTED = "BLOOM, MPT, Falcon with ALiBi, T5, mT5, UMT5, Inkling and Inkling 2"


def accelerate(model: PreTrainedModel) -> PreTrainedModel:
    """Runs the attention layers of a model on this package.

    Supported are BLOOM, MPT, Falcon with ALiBi, T5, mT5, UMT5, Inkling and Inkling 2.

    Forward and backward passes, `generate()` with a cache, padding and beams give the same results
    up to rounding, in memory proportional to the number of tokens. Parameters, their names and the
    state dict are unchanged. The model's configs are replaced by copies, as other models may share
    them.

    Returns:
        model, which is changed in place. A model that is already accelerated is left unchanged.

    Raises:
        TypeError: model is not a model of transformers.
        NotImplementedError: the model is not supported; the message names the reason, and the model
            is left unchanged. Calls of an accelerated model raise it for unsupported features:
            dropout of attention weights in training, output_attentions, masks of pairs, static
            caches, a different attn_implementation and, for T5 and Inkling, padding between tokens.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is a {type(model).__name__}; it must be a PreTrainedModel")
    known = [module for module in model.modules() if isinstance(module, tuple(_FUSED))]
    layers = [layer for layer in known if type(layer) not in _FUSED.values()]
    if known and not layers:
        return model
    _check(model, layers)
    trunk_types = tuple({_FUSED[type(layer)].trunk for layer in layers})
    trunks = [module for module in model.modules() if isinstance(module, trunk_types)]
    for layer in layers:
        layer.__class__ = _FUSED[type(layer)]
        layer.prepare()
    for trunk in trunks:
        trunk.register_forward_pre_hook(_check_call, with_kwargs=True)
    _name_in_configs(model, tuple({type(trunk.config) for trunk in trunks}))
    return model


def _check(model: PreTrainedModel, layers: list[nn.Module]) -> None:
    name = type(model).__name__
    if not layers:
        raise NotImplementedError(
            f"{name} has no attention layer that accelerate() supports, which are those of"
            f' {_SUPPORTED}; others may take attn_implementation="{NAME}"'
        )
    if model.config.output_attentions:
        refuse({"output_attentions": True})
    for layer in layers:
        kind = type(layer).__name__
        if type(layer) not in _FUSED:
            raise NotImplementedError(f"{name} has unsupported layers {kind}")
        if "forward" in vars(layer):
            raise NotImplementedError(f"the forward of {name}'s {kind} has been replaced")
        if reason := _FUSED[type(layer)].refusal(layer):
            raise NotImplementedError(f"{name} is not supported: {reason}")


def _name_in_configs(model: PreTrainedModel, types: tuple[type, ...]) -> None:
    """Sets the name in copies of the configs; modules that share a config share its copy.

    All configs are copied, because that of a multimodal model contains that of its text model.
    """
    copies = {}
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            module.config = copy.deepcopy(config, copies)
            if isinstance(config, types):
                module.config._attn_implementation = NAME


def _check_call(trunk: PreTrainedModel, args: tuple, kwargs: dict) -> None:
    """Checks a forward pass for arguments that it would ignore, or fail at without a reason."""
    if (implementation := trunk.config._attn_implementation) != NAME:
        raise NotImplementedError(
            f"attn_implementation is {implementation!r}; an accelerated model keeps {NAME!r}"
        )
    given = inspect.signature(trunk.forward).bind_partial(*args, **kwargs).arguments
    given.update(given.pop("kwargs", {}))
    refuse(given)
    for name in ("attention_mask", "encoder_attention_mask"):
        mask = given.get(name)
        if isinstance(mask, Tensor) and mask.dim() != 2:
            raise NotImplementedError(
                f"{name} has shape {tuple(mask.shape)}; it must be (batch, tokens)"
            )
