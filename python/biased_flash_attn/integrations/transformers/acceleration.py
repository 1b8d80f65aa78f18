"""`accelerate` replaces the attention layers of a model in place, `unaccelerate` undoes it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from . import padding
from .families import FAMILIES, FUSED, REFUSED
from .interface import NAME, refuse
from .layer import ACCELERATED
from .releases import warn_if_untested

Model = TypeVar("Model")


def accelerate(model: Model) -> Model:
    """Runs the attention layers of a model on this package.

    Forward and backward passes, `generate()` with a cache, padding and beams give the same results
    up to rounding, in memory proportional to the number of tokens. Parameters, their names and the
    state dict are unchanged, and `save_pretrained` does not save the acceleration. The model's
    configs are replaced by copies, as other models may share them.

    Args:
        model: a model of transformers, a module that contains some, such as a SentenceTransformer,
            or an object that holds one of these in its attribute `model`, such as a pipeline of
            transformers or a ChronosPipeline. The documentation lists the supported models.

    Returns:
        model, which is changed in place. A model that is already accelerated is left unchanged.

    Raises:
        TypeError: model neither is nor contains nor holds a model of transformers.
        NotImplementedError: the model is not supported; the message names the reason, and the model
            is left unchanged. Calls of an accelerated model raise it for unsupported features:
            dropout of attention weights in training, masks of pairs, static caches and a different
            attn_implementation.
    """
    warn_if_untested(transformers.__version__)
    root = _module_of(model)
    models = list(_outermost_models(root))
    if not models:
        raise _wrong_type(model)
    known = [module for module in root.modules() if isinstance(module, tuple(FUSED))]
    layers = [layer for layer in known if type(layer) not in FUSED.values()]
    if known and not layers:
        return model
    if not layers:
        raise _without_supported_layers(model, models)
    _check(type(model).__name__, layers)
    kinds = {FUSED[type(layer)] for layer in layers}
    trunk_types = tuple({fused.trunk for fused in kinds})
    for layer in layers:
        layer.__class__ = FUSED[type(layer)]
        layer.prepare()
    trunks = [module for module in root.modules() if isinstance(module, trunk_types)]
    without_padding = {fused.trunk for fused in kinds if fused.removes_padding}
    for trunk in trunks:
        if not hasattr(trunk, "_hooks_of_calls"):
            trunk._hooks_of_calls = (
                trunk.register_forward_pre_hook(_begin_call, with_kwargs=True),
                trunk.register_forward_hook(_end_call, always_call=True),
            )
            if type(trunk) in without_padding:
                trunk._hooks_of_calls += (
                    trunk.register_forward_pre_hook(padding.remove, with_kwargs=True),
                    # Before hooks of others, which see hidden states with padding.
                    trunk.register_forward_hook(padding.restore, prepend=True, with_kwargs=True),
                )
    _name_in_configs(root, tuple({type(trunk.config) for trunk in trunks}))
    return model


def unaccelerate(model: Model) -> Model:
    """Undoes `accelerate`: layers, hooks and configs are again as they were.

    Args:
        model: a module, or an object that holds one in its attribute `model`.

    Returns:
        model, which is changed in place. Layers that are not accelerated are left unchanged.

    Raises:
        TypeError: model neither is nor holds a module.
    """
    for module in _module_of(model).modules():
        if type(module) in FUSED.values():
            module.restore()
            module.__class__ = type(module).__bases__[-1]
        for hook in vars(module).pop("_hooks_of_calls", ()):
            hook.remove()
        if implementation := vars(module).pop("_own_implementation", None):
            module.config._attn_implementation = implementation
    return model


def _module_of(model) -> nn.Module:
    """Pipelines are no modules, and hold theirs in an attribute of this name."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(module, nn.Module):
        raise _wrong_type(model)
    return module


def _outermost_models(module: nn.Module) -> Iterator[PreTrainedModel]:
    """Without the models that they consist of."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from _outermost_models(child)


def _wrong_type(model) -> TypeError:
    return TypeError(
        f"model is a {type(model).__name__}; it must be or contain a PreTrainedModel, or hold one"
        " in its attribute `model`"
    )


def _without_supported_layers(model, models: list[PreTrainedModel]) -> NotImplementedError:
    name = type(model).__name__
    for kind, reason in REFUSED.items():
        if any(isinstance(layer, kind) for inner in models for layer in inner.modules()):
            return NotImplementedError(f"{name} is not supported: {reason}")
    kinds = " and ".join(dict.fromkeys(type(inner).__name__ for inner in models))
    unsupported = name if models == [model] else f"{kinds} in {name}"
    supported = ", ".join(family.name for family in FAMILIES)
    return NotImplementedError(
        f"{unsupported} has no attention layer that accelerate() supports, which are those of"
        f" {supported}; nothing was changed, and {name} works as before. Attention without biases,"
        f' as in BERT, needs no acceleration; others may take attn_implementation="{NAME}"'
    )


def _check(name: str, layers: list[nn.Module]) -> None:
    for layer in layers:
        kind = type(layer).__name__
        if type(layer) not in FUSED:
            raise NotImplementedError(f"{name} has unsupported layers {kind}")
        if "forward" in vars(layer):
            raise NotImplementedError(f"the forward of {name}'s {kind} has been replaced")
        if reason := FUSED[type(layer)].refusal(layer):
            raise NotImplementedError(f"{name} is not supported: {reason}")


def _name_in_configs(model: nn.Module, types: tuple[type, ...]) -> None:
    """Sets the name in copies of the configs; modules that share a config share its copy.

    All configs are copied, because that of a multimodal model contains that of its text model.
    """
    copies = {}
    for module in model.modules():
        if isinstance(config := vars(module).get("config"), PreTrainedConfig):
            module.config = copy.deepcopy(config, copies)
            if isinstance(config, types) and config._attn_implementation != NAME:
                module._own_implementation = config._attn_implementation
                module.config._attn_implementation = NAME


def _begin_call(trunk: PreTrainedModel, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Checks a forward pass for arguments that it would ignore, or fail at without a reason.

    Layers learn from the arguments alone whether to return attention weights.
    """
    if (implementation := trunk.config._attn_implementation) != NAME:
        raise NotImplementedError(
            f"attn_implementation is {implementation!r}; an accelerated model keeps {NAME!r}"
        )
    given = padding.arguments(trunk, args, kwargs)
    refuse(given)
    for name in ("attention_mask", "encoder_attention_mask"):
        mask = given.get(name)
        if isinstance(mask, Tensor) and mask.dim() != 2:
            raise NotImplementedError(
                f"{name} has shape {tuple(mask.shape)}; it must be (batch, tokens)"
            )
    if trunk.config.output_attentions and given.get("output_attentions") is None:
        kwargs = {**kwargs, "output_attentions": True}
    _set_accelerated(True)
    return args, kwargs


def _end_call(*_) -> None:
    _set_accelerated(False)


def _set_accelerated(value: bool) -> None:
    if not torch.compiler.is_compiling():
        ACCELERATED.set(value)
