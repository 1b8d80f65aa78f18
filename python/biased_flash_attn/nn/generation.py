"""Generation of tokens: prompts of different lengths, and the choice of the next token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..biases.parameters import finite, positive_int
from ..biases.relative import nonnegative_int
from ..sequences import Sequences
from ..validation import refuse_meta
from .tokens import check_ids, check_tokens


@dataclass(frozen=True)
class Prompts:
    """Prompts that all begin in the first column of tokens (B, N), and end after lengths (B,)."""

    tokens: Tensor
    lengths: Tensor

    @staticmethod
    def of(tokens: Tensor, key_padding_mask: Tensor | None) -> Prompts:
        """Validates prompts, and removes the padding before them. What follows a prompt is its last
        token."""
        check_ids(tokens)
        refuse_meta("tokens", tokens)
        if not tokens.numel():
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}; a prompt must have at least one token"
            )
        batch, n = tokens.shape
        if key_padding_mask is None:
            return Prompts(tokens, torch.full((batch,), n, device=tokens.device))
        check_tokens(tokens, key_padding_mask=key_padding_mask)
        _, _, first, lengths, _ = Sequences.from_mask(key_padding_mask, n).rows.unbind(1)
        if not lengths.all():
            b = int(lengths.argmin())
            raise ValueError(
                f"key_padding_mask has no token in row {b}; a prompt must have at least one, and"
                " True is for tokens"
            )
        place = torch.arange(int(lengths.max()), device=tokens.device)
        kept = first[:, None] + torch.minimum(place, lengths[:, None] - 1)
        return Prompts(tokens.gather(1, kept), lengths)

    def check_room(self, max_new_tokens: int, max_length: int | None) -> None:
        """Validates the number of tokens after each prompt, given the longest sequence."""
        nonnegative_int("max_new_tokens", max_new_tokens)
        longest = int(self.lengths.max())
        if max_length is not None and longest + max_new_tokens > max_length:
            raise ValueError(
                f"max_new_tokens is {max_new_tokens} after a prompt of {longest}; learned positions"
                f" have at most {max_length} together"
            )

    def pieces(self, most: int | None) -> tuple[Tensor, ...]:
        """Divides tokens into columns (B, n).

        If caches keep a window, at most `most` tokens are appended to a prompt that has ended:
        more would overwrite keys that it still sees.
        """
        if most is None:
            return (self.tokens,)
        ends = range(int(self.lengths.min()), self.tokens.shape[1], most)
        return self.tokens.tensor_split(list(ends), 1)


@dataclass(frozen=True)
class Sampler:
    """Chooses tokens given their logits; arguments are those of `CausalLM.generate`."""

    temperature: float = 0.0
    top_k: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self):
        if finite("temperature", self.temperature) < 0:
            raise ValueError(f"temperature must be 0 or more, not {self.temperature}")
        if self.top_k is not None:
            positive_int("top_k", self.top_k)
        if self.generator is not None and not isinstance(self.generator, torch.Generator):
            got = type(self.generator).__name__
            raise TypeError(f"generator is a {got}; it must be None or a torch.Generator")
        for name in ("top_k", "generator"):
            if not self.temperature and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is given with temperature 0, which takes the most likely token;"
                    " temperature must be positive, such as 1.0"
                )

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens (B, 1) for logits (B, vocab_size)."""
        if self.temperature == 0:
            return logits.argmax(-1, keepdim=True)
        candidates = None
        if self.top_k is not None:
            logits, candidates = logits.topk(min(self.top_k, logits.shape[-1]))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # A tiny temperature makes differences infinite, but none of them NaN.
        weights = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        tokens = torch.multinomial(weights, 1, generator=self.generator)
        return tokens if candidates is None else candidates.gather(1, tokens)


def check_stop_token(token: int, vocab_size: int) -> None:
    """Validates the token that ends a sequence."""
    if nonnegative_int("stop_token", token) >= vocab_size:
        raise ValueError(f"stop_token is {token}; it may be 0 to {vocab_size - 1}")
