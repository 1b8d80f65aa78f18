"""What torch.compile is told about the package's functions."""

from __future__ import annotations


def constant(function):
    """Marks a function that torch.compile evaluates while it traces its caller.

    The same as `torch.compiler.assume_constant_result`, which imports all of torch._dynamo: that
    takes longer than to import the package, and few processes compile.
    """
    function._dynamo_marked_constant = True
    return function
