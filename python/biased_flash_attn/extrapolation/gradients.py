"""The range of a trained model: gradients of a prediction with respect to earlier tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..biases.receptive_field import check_fraction
from .modules import evaluating, logits_of

SHARE = 0.99


def cumulative_gradient(
    model: nn.Module,
    inputs: Tensor,
    *,
    embedding: nn.Module | None = None,
    progress: bool = True,
) -> Tensor:
    """The cumulative normalized gradient of each sequence (Chi et al., "Dissecting", 2023).

    With g_m the gradient of the prediction with respect to the embedding of token m, and s_m =
    |g_m| / sum_n |g_n| in Euclidean norms, it is the sum of s over the most recent tokens
    (section 5.1). The prediction is the log-probability of the most likely next token according to
    the model. Sequences are processed one by one, in O(N) memory if the model's attention needs
    no more.

    Args:
        model: from tokens (B, N), or embeddings (B, N, dim), to logits (B, N, vocabulary); it is
            evaluated in evaluation mode.
        inputs: tokens or embeddings.
        embedding: the module from tokens to embeddings; the model's first nn.Embedding by default.
        progress: whether to show a progress bar after two seconds.

    Returns:
        (B, N) float64: entry m - 1 is the fraction of the m most recent tokens. It increases to 1.

    Raises TypeError or ValueError, naming the argument.
    """
    if not isinstance(inputs, Tensor) or inputs.dim() != (3 if inputs.is_floating_point() else 2):
        raise TypeError("inputs must be tokens (B, N), integers, or embeddings (B, N, dim)")
    bar = tqdm(inputs.split(1), delay=2, leave=False, disable=not progress)
    with evaluating(model) as device, torch.enable_grad():
        norms = [_gradient(model, part.to(device), embedding).double().norm(dim=-1) for part in bar]
    recent_first = torch.cat(norms).flip(1)
    return (recent_first / recent_first.sum(1, keepdim=True)).cumsum(1)


def empirical_receptive_field(curves: Tensor, share: float = SHARE) -> Tensor:
    """The number of most recent tokens with more than a fraction `share` of the gradient.


    It is ERF = min{m : c_m > 0.99} of Chi et al., 2023, (B,) int64, for curves (B, N) of
    `cumulative_gradient`. The paper's sum runs from token m to the last, so that c_1 = 1 and the
    minimum would always be 1; its figures and text count m back from the last token, as here.
    """
    check_fraction("share", share)
    return (curves <= share).sum(-1) + 1


def _gradient(model: nn.Module, inputs: Tensor, embedding: nn.Module | None) -> Tensor:
    """The gradient of the last prediction with respect to the embeddings, (1, N, dim)."""
    if inputs.is_floating_point():
        leaf = inputs.detach().requires_grad_()
        return torch.autograd.grad(_prediction(model, leaf), leaf)[0]
    if embedding is None:
        embedding = next((m for m in model.modules() if isinstance(m, nn.Embedding)), None)
        if embedding is None:
            raise ValueError("embedding is None, and model has no nn.Embedding; name the module")
    leaves: list[Tensor] = []

    def detach(module, arguments, output):
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    hook = embedding.register_forward_hook(detach)
    try:
        prediction = _prediction(model, inputs)
    finally:
        hook.remove()
    if len(leaves) != 1 or leaves[0].shape[:2] != inputs.shape:
        raise ValueError(
            f"embedding was called {len(leaves)} times; it must be called once, on the tokens"
        )
    return torch.autograd.grad(prediction, leaves[0])[0]


def _prediction(model: nn.Module, inputs: Tensor) -> Tensor:
    return logits_of(model, inputs)[0, -1].float().log_softmax(-1).max()
