"""The decoding steps that the benchmarks measure on CPUs and GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from biased_flash_attn import KVCache, biased_flash_attn, biased_flash_attn_with_kvcache, biases

CHUNK = 64
CHECKED_LENGTH = 330  # several tiles, the last one partial
MAKE = {"no bias": lambda heads: None, "alibi": biases.ALiBi}


class Decoder:
    """A cache of normally distributed keys, and steps that append tokens and attend to all keys.

    heads: the numbers of query and key heads. length: the number of keys after CHUNK tokens.
    """

    def __init__(
        self,
        bias: str,
        length: int,
        heads: tuple[int, int],
        head_dim: int,
        *,
        tokens: int = 1,
        tolerance: float | None = 0.0,
        batch: int = 1,
        device: str = "cpu",
        backend: str = "cpu",
    ):
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, n: int) -> Tensor:
            shape = (batch, heads, n, head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        self.length, self.tokens, self.tolerance = length, tokens, tolerance
        self.backend = backend
        self.first = length - CHUNK
        n_heads, kv_heads = heads
        self.q = normal(n_heads, CHUNK)
        self.k, self.v = normal(kv_heads, length), normal(kv_heads, length)
        self.bias = MAKE[bias](n_heads)
        self.cache = KVCache(batch, kv_heads, head_dim, dtype=torch.bfloat16, device=device)
        self.append(self.q[:, :, :0], slice(0, self.first))

    def append(self, q: Tensor, tokens: slice) -> Tensor:
        k, v = self.k[:, :, tokens], self.v[:, :, tokens]
        return biased_flash_attn_with_kvcache(
            q, self.cache, k, v, self.bias, tolerance=self.tolerance, backend=self.backend
        )

    def __call__(self) -> Tensor:
        """Decodes the next of CHUNK tokens, and starts again after the last one."""
        now = self.cache.lengths[0]
        if now == self.length:
            now = self.first
            self.cache.truncate(now)
        end = now + self.tokens
        return self.append(self.q[:, :, now - self.first : end - self.first], slice(now, end))

    def last(self) -> Tensor:
        """Decodes the last token or tokens."""
        now, end = self.cache.lengths[0], self.length - self.tokens
        if now > end:
            self.cache.truncate(end)
        else:
            self.append(self.q[:, :, :0], slice(now, end))
        return self()

    def whole(self) -> Tensor:
        """The result of one call over the whole sequence for the same queries."""
        return biased_flash_attn(
            self.q, self.k, self.v, self.bias, tolerance=self.tolerance, backend=self.backend
        )

    def check(self) -> None:
        """Fails if the last step differs from exact attention by more than rounding."""
        q, k, v = (x.double() for x in (self.q[:, :, -self.tokens :], self.k, self.v))
        exact = biased_flash_attn(q, k, v, self.bias, backend="reference")
        error = (self.last() - exact).abs().max()
        assert error <= 8 * torch.finfo(torch.bfloat16).eps * v.abs().max()
