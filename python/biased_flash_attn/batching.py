"""The rules by which torch.vmap, and what PyTorch builds on it, map the operators.

These are per-sample gradients, torch.func.jacrev and torch.autograd.grad with is_grads_batched.
"""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

_OPERATORS = torch.ops.biased_flash_attn
# Operators whose mapped dimension may become part of the batch, and the dimension of batches in
# their results.
_MERGEABLE = {"forward": 0, "backward": 0, "plan": 1}
_BATCHED_GRADIENT = torch._C._dispatch_key_parse("Batched")


def register(library: torch.library.Library) -> None:
    """Registers the rules of all operators of an ordinary call."""
    for name in (*_MERGEABLE, "rows_of_offsets", "rows_of_mask", "prefix_sums"):
        operator = getattr(_OPERATORS, name).default
        rule = _rule(name, operator)
        torch.library.register_vmap(
            operator.name(),
            lambda info, dims, *x, rule=rule: rule(info.batch_size, dims, *x),
            lib=library,
        )
        library.impl(name, _rule_of_batched_gradients(rule), "Batched")


def _rule(name: str, operator):
    """Maps a tuple of arguments, whose mapped dimensions, or None, are `dims`."""
    names = [x.name for x in operator._schema.arguments]

    def one_by_one(n, dims, *arguments):
        def entry(number: int):
            return pytree.tree_map(
                lambda x, dim: x if dim is None else x.select(dim, number), arguments, dims
            )

        results = [operator(*entry(number)) for number in range(n)]
        return pytree.tree_map(lambda *x: torch.stack(x), *results), 0

    def merged(n, dims, *arguments):
        given, mapped = (dict(zip(names, x, strict=True)) for x in (arguments, dims))
        if not _may_merge(given, mapped):
            return one_by_one(n, dims, *arguments)
        results = operator(*(_merged(x, given[x], mapped[x], n) for x in names))
        batch, at = (n, -1), _MERGEABLE[name]
        return pytree.tree_map(lambda x: x.unflatten(at, batch), results), at

    return merged if name in _MERGEABLE else one_by_one


def _rule_of_batched_gradients(rule):
    """The same for the tensors of another kind that is_grads_batched maps over."""

    def mapped(*arguments):
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        dims = pytree.tree_map(lambda x: 0 if _is_batched_gradient(x) else None, arguments)
        arguments = pytree.tree_map(
            lambda x, dim: x if dim is None else torch._remove_batch_dim(x, level, 1, dim),
            arguments,
            dims,
        )
        (n,) = {
            len(x)
            for x, dim in zip(*map(pytree.tree_leaves, (arguments, dims)), strict=True)
            if dim is not None
        }
        results, dim = rule(n, dims, *arguments)
        return pytree.tree_map(lambda x: torch._add_batch_dim(x, dim, level), results)

    return mapped


def _is_batched_gradient(x) -> bool:
    return torch.is_tensor(x) and torch._C._dispatch_keys(x).has(_BATCHED_GRADIENT)


def _may_merge(given: dict, mapped: dict) -> bool:
    """Whether every entry has the same form, which broadcasts over the batch and gets no gradient,
    and no ranges of rows."""
    same_form = not any(dim is not None for dim in mapped["form_tensors"])
    broadcasts = all(len(x) == 1 for x in given["form_tensors"])
    return same_form and broadcasts and given["rows"] is None and not given.get("targets")


def _merged(name: str, x, dim: int | None, n: int):
    """An argument, with its mapped dimension in front of the batch and merged with it."""
    if not torch.is_tensor(x):
        return x
    at = 1 if name == "plan" else 0
    if dim is None:
        x = x.unsqueeze(at)
        x = x.expand(*x.shape[:at], n, *x.shape[at + 1 :])
    else:
        x = x.movedim(dim, at)
    return x.flatten(at, at + 1)
