"""Layers of biases: their initial values, and how they are called."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor, nn
from torch.func import functional_call


class NormalLinear(nn.Linear):
    """A linear layer whose initial weights are normal, and whose initial bias is 0."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, std: float = 0.02):
        self.std = std  # which super().__init__ needs for the initial values
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class NormalEmbedding(nn.Embedding):
    """An embedding whose initial values are those of GPT-2 (Radford et al., 2019)."""

    STD = 0.02

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.STD)


class XavierEmbedding(nn.Embedding):
    """An embedding whose initial values are Xavier uniform."""

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight)


def dtype_of(layer: nn.Module) -> torch.dtype:
    """The widest dtype of a layer's parameters; float32 for a quantized layer, which has none."""
    dtypes = [x.dtype for x in layer.parameters() if x.is_floating_point()]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def called(layer: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """layer(x), with x and the parameters of the layer converted to dtype."""
    named = layer.named_parameters()
    others = {n: p.to(dtype) for n, p in named if p.is_floating_point() and p.dtype != dtype}
    x = x.to(dtype)
    return functional_call(layer, others, x) if others else layer(x)


def check_linear(name: str, layer: nn.Module) -> None:
    """Raises TypeError unless a layer, whose weights are read, is one that multiplies by them."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        got = type(layer).__name__
    elif layer._forward_pre_hooks or layer._forward_hooks:
        got = f"{type(layer).__name__} with forward hooks"
    else:
        return
    raise TypeError(
        f"{name} is a {got}; it must be a torch.nn.Linear without forward hooks, as its weights are"
        " read and it is never called"
    )
