"""Calls of models, which may be any module from tokens or embeddings to logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Evaluation mode within the block; the mode of every module is restored afterwards.

    Yields the device of the model's first parameter, or the CPU for a model without parameters.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; it must be a torch.nn.Module")
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    finally:
        for module, mode in modes:
            module.training = mode


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """The checked logits (B, N, vocabulary) for tokens (B, N) or embeddings (B, N, dim)."""
    logits = model(inputs)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != inputs.shape[:2]:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"model returned {got} for {tuple(inputs.shape)}, not logits (B, N, vocabulary)"
        )
    return logits
