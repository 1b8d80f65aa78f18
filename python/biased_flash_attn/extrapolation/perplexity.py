"""Perplexity against the length of the context, by the protocols of the papers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from .modules import evaluating, logits_of

BATCH_TOKENS = 2**13  # per call of the model, or one sequence if it is longer


@dataclass(frozen=True)
class Perplexity:
    """Perplexity, the exponential of the mean of -log p.

    Attributes:
        nats: the mean, over `tokens` tokens.
        standard_error: of nats, if losses were independent.
    """

    nats: float
    standard_error: float
    tokens: int

    @property
    def value(self) -> float:
        return math.exp(self.nats)


def last_token_perplexity(
    model: nn.Module, segments: Tensor, length: int, *, progress: bool = True
) -> Perplexity:
    """Perplexity of the last token of each segment, given `length` tokens before it.

    The same tokens are predicted at every length, and only their context differs (Chi et al.,
    "Dissecting Transformer Length Extrapolation", 2023, section 3.4).

    Args:
        model: from tokens (B, N) to logits (B, N, vocabulary); it is evaluated in evaluation mode.
        segments: (S, n), integers, with n > length.
        length: the number of tokens of the model's input.
        progress: whether to show a progress bar after two seconds.

    Raises TypeError or ValueError, naming the argument.
    """
    check_tokens("segments", segments, 2)
    check_length("length", length, segments.shape[1] - 1)
    batch = max(1, BATCH_TOKENS // length)
    windows = ((part[:, -1 - length : -1], part[:, -1:]) for part in segments.split(batch))
    return _perplexity(model, windows, len(segments), progress)


def nonoverlapping_perplexity(
    model: nn.Module, tokens: Tensor, length: int, *, progress: bool = True
) -> Perplexity:
    """Perplexity of all tokens but the first, in consecutive windows of `length` tokens.

    This is the fastest protocol, and the one of the papers' large tables. The first tokens of each
    window have almost no context, which affects longer windows less ("early token curse", Press et
    al., 2022, appendix B). The last window may be shorter. Arguments and errors are those of
    `sliding_perplexity`.
    """
    return sliding_perplexity(model, tokens, length, length, progress=progress)


def sliding_perplexity(
    model: nn.Module, tokens: Tensor, length: int, stride: int, *, progress: bool = True
) -> Perplexity:
    """Perplexity of all tokens but the first, in windows that move by `stride` tokens.

    Each window contributes its last tokens. After the first window every token has at least
    length - stride tokens of context, for length / stride times the work (Press et al., 2022,
    appendix B; Qin et al., 2023, figure 1).

    Args:
        model: from tokens (B, N) to logits (B, N, vocabulary); it is evaluated in evaluation mode.
        tokens: (T,), integers, on any device, or mapped from a file: one batch of windows at a time
            is moved to the model's device.
        length: the number of tokens of the model's input.
        stride: 1 to length.
        progress: whether to show a progress bar after two seconds.

    Raises TypeError or ValueError, naming the argument.
    """
    check_tokens("tokens", tokens, 1)
    check_length("length", length, None)
    check_length("stride", stride, length)
    count = 1 + max(0, math.ceil((len(tokens) - 1 - length) / stride))
    return _perplexity(model, _windows(tokens, length, stride), count, progress)


def _windows(tokens: Tensor, length: int, stride: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs (B, n) and the targets of their last positions, in batches."""
    last = len(tokens) - 1
    end = min(length, last)
    yield tokens[None, :end], tokens[None, 1 : end + 1]
    whole, rest = divmod(max(0, last - length), stride)
    if whole:
        batch = max(1, BATCH_TOKENS // length)
        inputs = tokens[stride:last].unfold(0, length, stride)
        targets = tokens[length + 1 :].unfold(0, stride, stride)
        yield from zip(inputs.split(batch), targets.split(batch), strict=True)
    if rest:
        yield tokens[None, (whole + 1) * stride : last], tokens[None, -rest:]


def segment_losses(
    model: nn.Module, segments: Tensor, length: int, scored: int, *, progress: bool = True
) -> Tensor:
    """Losses of the last tokens of each segment in nats, (S, scored) float64.

    The same tokens are predicted at every length. The first of them has length - scored + 1 tokens
    before it and the last one `length`. The other arguments and errors are those of
    `last_token_perplexity`.
    """
    check_tokens("segments", segments, 2)
    check_length("length", length, segments.shape[1] - 1)
    check_length("scored", scored, length)
    batch = max(1, BATCH_TOKENS // length)
    windows = ((part[:, -1 - length : -1], part[:, -scored:]) for part in segments.split(batch))
    return torch.cat(list(token_losses(model, windows, len(segments), progress)))


def _perplexity(
    model: nn.Module, windows: Iterable[tuple[Tensor, Tensor]], count: int, progress: bool
) -> Perplexity:
    tokens, total, squares = 0, 0.0, 0.0
    for losses in token_losses(model, windows, count, progress):
        tokens += losses.numel()
        total += losses.sum().item()
        squares += losses.square().sum().item()
    mean = total / tokens
    variance = max(0.0, squares / tokens - mean**2)
    return Perplexity(mean, math.sqrt(variance / tokens), tokens)


@torch.no_grad()
def token_losses(
    model: nn.Module,
    windows: Iterable[tuple[Tensor, Tensor]],
    count: int,
    progress: bool = True,
) -> Iterator[Tensor]:
    """Losses of targets (B, n) at the last n positions of inputs (B, N), `count` windows in all.

    They are float64, on the CPU, and 0 for targets of -100."""
    bar = tqdm(total=count, delay=2, leave=False, disable=not progress)
    with evaluating(model) as device, bar:
        for inputs, targets in windows:
            logits = logits_of(model, inputs.to(device).long())[:, -targets.shape[1] :]
            wanted = targets.to(device).long().flatten()
            losses = F.cross_entropy(logits.flatten(0, 1).float(), wanted, reduction="none")
            yield losses.view(targets.shape).double().cpu()
            bar.update(len(inputs))


def check_tokens(name: str, tokens: Tensor, dimensions: int) -> None:
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.is_complex():
        raise TypeError(f"{name} must be a tensor of integers")
    shape = "(T,) with T" if dimensions == 1 else "(S, n) with n"
    if tokens.dim() != dimensions or tokens.shape[-1] < 2 or not len(tokens):
        raise ValueError(f"{name} has shape {tuple(tokens.shape)}; it must be {shape} at least 2")


def check_length(name: str, length: int, most: int | None) -> None:
    allowed = "1 or more" if most is None else f"1 to {most}"
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"{name} is {length!r}; it must be an int, {allowed}")
    if length < 1 or (most is not None and length > most):
        raise ValueError(f"{name} is {length}; it may be {allowed}")
