"""Transformers like GPT-2 and BERT, whose position scheme is one argument."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..biases.layers import NormalEmbedding, NormalLinear
from ..decoding.kv_cache import KVCache
from .attention import BiasedAttention
from .embeddings import LearnedEmbedding, SinusoidalEmbedding, TiedLinear
from .generation import Prompts, Sampler, check_stop_token
from .positions import Positions
from .positions import positions as scheme_of
from .tokens import check_ids, check_tokens, positions_of


class CausalLM(nn.Module):
    """A causal language model like GPT-2 (Radford et al., 2019).

    Norms precede attention and MLP, and the output layer shares the weights of the embedding.

    Args:
        vocab_size: the number of different tokens.
        dim: channels of the hidden states.
        layers: the number of blocks.
        num_heads: the number of query heads.
        positions: the position scheme, a name or `Positions`.
        kv_heads: the number of key and value heads, num_heads by default.
        max_length: the longest sequence, for learned positions only; others have no limit.
        backend: as in `biased_flash_attn`.

    Raises:
        TypeError, ValueError: naming the argument, its value and the permitted values.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        layers: int,
        num_heads: int,
        positions: str | Positions = "alibi",
        *,
        kv_heads: int | None = None,
        max_length: int | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        options = {"kv_heads": kv_heads, "backend": backend}
        self.embedding = TokenEmbedding(vocab_size, dim, scheme_of(positions), max_length)
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, positions, layers, **options) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = TiedLinear(self.embedding.tokens, bias=False)

    @property
    def max_length(self) -> int | None:
        """The longest sequence, or None without a limit."""
        return self.embedding.max_length

    def forward(
        self,
        tokens: Tensor,
        caches: list[KVCache] | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, N, vocab_size) of the token after each of tokens (B, N).

        Only one of the following may be given. The logits of each sequence are then those of the
        sequence alone.

        Args:
            tokens: (B, N) int64 or int32.
            caches: those of `make_caches`: tokens are the next ones of their sequences.
            key_padding_mask: (B, N) bool, True for tokens and False for padding before or after
                them. Padding is any token of the vocabulary, and its logits are arbitrary.
            cu_seqlens: (documents + 1,) int32, offsets that rise from 0 to N: tokens (1, N) are
                documents, and document b is tokens[0, cu_seqlens[b] : cu_seqlens[b + 1]].

        Raises TypeError or ValueError, naming the argument.
        """
        sequences = {"key_padding_mask": key_padding_mask, "cu_seqlens": cu_seqlens}
        return self.head(self._states(tokens, caches, **sequences))

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        *,
        key_padding_mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        stop_token: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continues prompts, one token at a time, with keys and values in caches.

        By default, each new token is the most likely one. Hooks on the model itself are not called,
        as most logits of prompts are not computed; those on its layers are.

        Args:
            tokens: the prompts, (B, N) int64 or int32.
            max_new_tokens: the number of new tokens, 0 or more.
            key_padding_mask: (B, N) bool, True for prompts and False for padding before or after
                them. The continuation of each prompt is that of the prompt alone.
            temperature: if positive, tokens are drawn from softmax(logits / temperature).
            top_k: if given, they are drawn from the top_k most likely ones.
            stop_token: if given, the token that ends a sequence, which is then filled with it.
                Generation ends when all sequences have ended.
            generator: the source of random numbers, on the device of the model; PyTorch's default
                one if None.

        Returns:
            (B, N + new tokens): tokens as given, padding included, and the new ones.

        Raises:
            TypeError, ValueError: naming the argument, its value and the permitted values, before
                anything is computed. With learned positions, a prompt and its continuation have at
                most max_length tokens.
        """
        prompts = Prompts.of(tokens, key_padding_mask)
        prompts.check_room(max_new_tokens, self.max_length)
        choose = Sampler(temperature, top_k, generator)
        if stop_token is not None:
            check_stop_token(stop_token, self.head.out_features)
        caches, new = self.make_caches(len(tokens)), []
        has_ended = torch.zeros((len(tokens), 1), dtype=torch.bool, device=tokens.device)
        while len(new) < max_new_tokens and (stop_token is None or not has_ended.all()):
            states = self._states(new[-1], caches)[:, -1] if new else self._read(prompts, caches)
            following = choose(self.head(states)).to(tokens.dtype)
            if stop_token is not None:
                following = following.masked_fill(has_ended, stop_token)
                has_ended = following == stop_token
            new.append(following)
        return torch.cat([tokens, *new], 1)

    def make_caches(self, batch: int, dtype: torch.dtype | None = None) -> list[KVCache]:
        """Empty caches of all blocks for `batch` sequences, as by `BiasedAttention.make_cache`."""
        return [block.attention.make_cache(batch, dtype) for block in self.blocks]

    def _states(self, tokens: Tensor, caches: list[KVCache] | None = None, **sequences) -> Tensor:
        """The hidden states (B, N, dim) of which `forward` returns the logits."""
        check_ids(tokens)
        cache = caches and caches[0]
        max_seqlen = check_tokens(tokens, cache, **sequences)
        x = self.embedding(tokens, cache, **sequences)
        for n, block in enumerate(self.blocks):
            x = block(x, caches and caches[n], max_seqlen=max_seqlen, **sequences)
        return self.norm(x)

    def _read(self, prompts: Prompts, caches: list[KVCache]) -> Tensor:
        """Appends prompts to empty caches, and returns the hidden states (B, dim) at their ends."""
        lengths, end, last = prompts.lengths.tolist(), 0, [None] * len(prompts.lengths)
        for piece in prompts.pieces(caches[0].most_tokens):
            begin, end = end, end + piece.shape[1]
            states = self._states(piece, caches)
            for b, length in enumerate(lengths):
                if begin < length <= end:
                    last[b] = states[b, length - 1 - begin]
            for cache in caches:
                cache.truncate([min(length, end) for length in lengths])
        return torch.stack(last)


class Encoder(nn.Module):
    """A bidirectional encoder like BERT (Devlin et al., 2019), with its masked-language-model head.

    Norms follow attention and MLP. Arguments and errors are those of `CausalLM`; windowed
    attention, which is causal, is refused.
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        layers: int,
        num_heads: int,
        positions: str | Positions = "alibi",
        *,
        kv_heads: int | None = None,
        max_length: int | None = None,
        backend: str | None = None,
    ):
        super().__init__()
        options = {"kv_heads": kv_heads, "backend": backend, "causal": False, "norm_first": False}
        self.embedding = TokenEmbedding(vocab_size, dim, scheme_of(positions), max_length)
        self.norm = nn.LayerNorm(dim)
        self.blocks = nn.ModuleList(
            Block(dim, num_heads, positions, layers, **options) for _ in range(layers)
        )
        self.transform = nn.Sequential(NormalLinear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
        self.head = TiedLinear(self.embedding.tokens)

    def forward(
        self,
        tokens: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, N, vocab_size) for the token at each position of tokens (B, N).

        Arguments are as in `CausalLM`.
        """
        x = self.encode(tokens, key_padding_mask, cu_seqlens=cu_seqlens)
        return self.head(self.transform(x))

    def encode(
        self,
        tokens: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Hidden states (B, N, dim) of tokens (B, N)."""
        sequences = {"key_padding_mask": key_padding_mask, "cu_seqlens": cu_seqlens}
        check_ids(tokens)
        max_seqlen = check_tokens(tokens, **sequences)
        x = self.norm(self.embedding(tokens, **sequences))
        for block in self.blocks:
            x = block(x, max_seqlen=max_seqlen, **sequences)
        return x


class TokenEmbedding(nn.Module):
    """Embeddings of tokens, and of positions if the scheme has them."""

    def __init__(self, vocab_size: int, dim: int, scheme: Positions, max_length: int | None):
        super().__init__()
        self.tokens = NormalEmbedding(vocab_size, dim)
        self.max_length = self.positions = None
        self.scale = 1.0
        if scheme.embedding == "learned":
            if max_length is None:
                raise ValueError("max_length is None; learned positions need the longest length")
            self.max_length = max_length
            self.positions = LearnedEmbedding(dim, max_length)
        elif scheme.embedding == "sinusoidal":
            self.positions = SinusoidalEmbedding(dim)
            # The ratio of Vaswani et al., whose tokens have a standard deviation of 1. Here that
            # of tokens is the same with every scheme, as comparisons require.
            self.scale = NormalEmbedding.STD

    def forward(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Embeds tokens (B, N) as (B, N, dim); the other arguments are as in `BiasedAttention`."""
        x = self.tokens(tokens)
        if self.positions is None:
            return x
        positions = positions_of(tokens, cache, key_padding_mask, cu_seqlens)
        return x + (self.scale * self.positions(positions)).to(x.dtype)


class Block(nn.Module):
    """Residual attention and MLP, with norms before or after them, one of `layers` blocks."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        positions: str | Positions,
        layers: int,
        *,
        norm_first: bool = True,
        **options,
    ):
        super().__init__()
        # As in GPT-2, the scale of residual branches decreases with the number of layers.
        std = 0.02 / (2 * layers) ** 0.5
        self.attention = BiasedAttention(dim, num_heads, positions, out_std=std, **options)
        self.mlp = nn.Sequential(
            NormalLinear(dim, 4 * dim), nn.GELU(), NormalLinear(4 * dim, dim, std=std)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.norm_first = norm_first

    def forward(self, x: Tensor, cache: KVCache | None = None, **options) -> Tensor:
        """Maps hidden states (B, N, dim) to (B, N, dim); options are those of `BiasedAttention`."""
        if self.norm_first:
            x = x + self.attention(self.norms[0](x), cache, **options)
            return x + self.mlp(self.norms[1](x))
        x = self.norms[0](x + self.attention(x, cache, **options))
        return self.norms[1](x + self.mlp(x))
