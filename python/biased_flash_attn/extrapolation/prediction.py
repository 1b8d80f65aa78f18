"""What reaches a token through all layers of a model, according to the formula of its bias."""

from __future__ import annotations

import torch
from torch import Tensor

from ..biases.distance import PositionBias
from ..biases.parameters import finite, positive_int
from .convergence import check_position_bias

# How the heads' fractions beyond the training length become one number.
HEADS = ("separate", "narrowest", "mixed")
# The range of the products q.k, chosen as docs/laboratory/prediction.md describes.
CONTENT = 6.0
# The largest exp(b) as a multiple of that of distance 0, for which sums are accurate to 1e-10.
LARGEST = 1e6
# Fractions of one distance that are smaller are 0.
ROUNDING = 1e-15


@torch.no_grad()
def information(
    bias: PositionBias | None,
    layers: int,
    length: int,
    *,
    window: int | None = None,
    mixed: bool = False,
    content: float = CONTENT,
    residual: float = 0.0,
) -> Tensor:
    """The distances from which information reaches the last token of a sequence.

    A layer takes information from the keys in proportion to min(1, exp(b(d) - max b + content)), as
    if products q.k that are larger by up to `content` at distant keys canceled the bias there as
    far as they can. Through all layers this is a random walk of `layers` steps towards the
    beginning of the sequence. With content = 0 all products are equal; with residual = 1/2 as well
    it is the rollout of attention of Abnar and Zuidema (2020).

    Args:
        bias: a bias that is a function of the distance, or None for uniform attention.
        layers: the number of attention layers, which all have this bias.
        length: the number of tokens.
        window: as in `biased_flash_attn`.
        mixed: whether each layer mixes the information of all heads evenly; otherwise it stays in
            one head.
        content: the difference between the largest and the smallest q.k, after scaling.
        residual: the fraction in [0, 1] that a layer leaves at its position.

    Returns:
        the fraction from each distance 0, ..., length - 1, whose sum is 1, (heads, length) float64;
        heads is 1 if they are mixed, or without a bias.

    Raises TypeError or ValueError, naming the argument.
    """
    positive_int("layers", layers)
    positive_int("length", length)
    if finite("content", content) < 0:
        raise ValueError(f"content is {content}; it must be at least 0")
    if not 0 <= finite("residual", residual) <= 1:
        raise ValueError(f"residual is {residual}; it must be from 0 to 1")
    weights = _weights(bias, length, window, content)
    # A query sees as many keys as its position allows, and its weights sum to 1.
    sums = weights.cumsum(-1)
    spectrum = torch.fft.rfft(weights, 2 * length).conj()
    walk = torch.zeros(1 if mixed else len(weights), length, dtype=torch.float64)
    walk[:, -1] = 1
    for _ in range(layers):
        attended = torch.fft.irfft(torch.fft.rfft(walk / sums, 2 * length) * spectrum)
        attended = attended[:, :length]
        if mixed:
            attended = attended.mean(0, keepdim=True)
        walk = residual * walk + (1 - residual) * attended
    found = walk.flip(1)
    # Fourier transforms leave rounding errors where no walk leads.
    return found.where(found > ROUNDING, 0)


def predict(
    bias: PositionBias | None,
    layers: int,
    train_length: int,
    eval_length: int,
    *,
    window: int | None = None,
    heads: str = "separate",
    content: float = CONTENT,
    residual: float = 0.0,
) -> float:
    """The fraction of the `information` at the last of eval_length tokens that comes from distances
    of train_length and more, which training does not show.

    The larger it is, the more a model may lose at this length. docs/laboratory/prediction.md
    compares it with what the papers measured, and shows where it fails.

    Args:
        bias: as in `information`, as are layers, window, content and residual.
        train_length: the length of the sequences in training.
        eval_length: the length of the sequence that is evaluated.
        heads: "separate" for the mean of the heads' fractions, "narrowest" for the smallest one, or
            "mixed" if each layer mixes their information.

    Raises TypeError or ValueError, naming the argument.
    """
    positive_int("train_length", train_length)
    positive_int("eval_length", eval_length)
    if heads not in HEADS:
        raise ValueError(f"heads is {heads!r}; it may be {', '.join(HEADS)}")
    found = information(
        bias,
        layers,
        eval_length,
        window=window,
        mixed=heads == "mixed",
        content=content,
        residual=residual,
    )
    return beyond(found, train_length, heads)


def beyond(found: Tensor, train_length: int, heads: str) -> float:
    """The fraction of `information` from train_length on, of heads that are combined as named."""
    fractions = found[:, train_length:].sum(1)
    return (fractions.min() if heads == "narrowest" else fractions.mean()).item()


def _weights(bias: PositionBias | None, length: int, window: int | None, content: float) -> Tensor:
    """What a query takes from each distance, relative to the largest, (heads, length)."""
    d = torch.arange(length, dtype=torch.float64)
    if bias is None:
        logits = torch.zeros(1, length, dtype=torch.float64)
    else:
        check_position_bias("bias", bias)
        logits = bias.curve(d.to(bias.device)).cpu().expand(bias.num_heads, -1)
    if window is not None:
        logits = logits.masked_fill(d >= positive_int("window", window), -torch.inf)
    weights = (logits - logits.amax(-1, keepdim=True) + content).clamp(max=0).exp()
    if not (weights[:, 0] * LARGEST >= 1).all():
        raise ValueError(
            f"bias grows with the distance, by more than a factor {LARGEST:.0e} of exp(b), or is"
            " not finite at distance 0"
        )
    return weights
