"""What the package tells torch.compile, and what it must know of torch.func."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch


def is_transformed() -> bool:
    """Whether a transform of torch.func runs, such as grad or vmap."""
    return torch._C._are_functorch_transforms_active()


def is_mapped(x: Tensor) -> bool:
    """Whether torch.vmap maps over x, whose values cannot be read then."""
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return True
        x = _functorch.get_unwrapped(x)
    return False


def values_of(x: Tensor) -> Tensor:
    """The numbers of x for all entries that transforms of torch.func map over, for decisions that
    may be the same for all of them. Without transforms, x itself."""
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def constant(function):
    """Marks a function that torch.compile evaluates while it traces its caller.

    The same as `torch.compiler.assume_constant_result`, which imports all of torch._dynamo: that
    takes longer than to import the package, and few processes compile.
    """
    function._dynamo_marked_constant = True
    return function
