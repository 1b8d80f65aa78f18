"""Gradients of the tensors of forms: where they go, and sums over rows that GPU kernels compute."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..sequences import Sequences

# Where a backward pass puts the gradient of a form's tensor: in a tensor of its own or, if it is q
# or k itself, such as the factors of biases.Disentangled, in the gradient of q or k.
OWN, IN_Q, IN_K = 0, 1, 2


def sum_of_rows(
    x: Tensor, entries: int, sequences: Sequences | None, are_keys: bool = False
) -> Tensor:
    """Sums (B, H, n) over rows, queries or keys, to (B, H) float64. For packed sequences, each
    sequence is summed separately if the form has several batch entries, `entries`."""
    if sequences is None or not sequences.is_packed or entries == 1:
        return x.sum(-1, dtype=torch.float64)
    each = x.split(sequences.rows[:, 3 if are_keys else 1].tolist(), -1)
    return torch.cat([one.sum(-1, dtype=torch.float64) for one in each])


def sums_gradient(
    grad_query_sums: Tensor, grad_key_sums: Tensor, sequences: Sequences | None
) -> Tensor:
    """Returns the gradient of C, (B, H, places) float64, from those at the queries and at the
    keys."""
    gradient = grad_key_sums.double()
    if sequences is not None and (sequences.is_packed or sequences.longest_shift):
        # Each place has at most one query. Queries before the first key are added to an extra
        # place.
        room = pad(gradient, (0, sequences.places + 1 - gradient.shape[-1]))
        place = sequences.keys_of_queries().unsqueeze(-2).expand(grad_query_sums.shape)
        return room.scatter_add_(-1, place, grad_query_sums.double())[..., :-1]
    shown = min(grad_query_sums.shape[2], grad_key_sums.shape[2])
    gradient[..., grad_key_sums.shape[2] - shown :] += grad_query_sums[
        ..., grad_query_sums.shape[2] - shown :
    ]
    return gradient
