"""Generates text with a KV cache, from a small model of bytes with any of the biases.

    python examples/generate.py kerple_log
    python examples/generate.py --window 64 --tokens 400 alibi cable

The model learns from the text of this package's README for a few seconds. Then it continues a
prompt, one token at a time, and at every step its logits are compared with those of a forward pass
over all tokens so far. What to copy is `Attention`: the same layer trains and decodes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biased_flash_attn import KVCache, biased_flash_attn, biased_flash_attn_with_kvcache, biases

BIASES = (*biases.DISTANCE_BIASES, *biases.CONTEXT_BIASES)
DIM, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2
HEAD_DIM = DIM // HEADS
TEXT = Path(__file__).parents[1] / "README.md"


class Attention(nn.Module):
    """Attention with a bias; heads of queries share heads of keys."""

    def __init__(self, bias: str, window: int | None):
        super().__init__()
        self.window = window
        self.project = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(DIM, DIM, bias=False)
        self.of_content = bias in biases.CONTEXT_BIASES
        if self.of_content:
            self.bias = biases.CONTEXT_BIASES[bias](DIM, HEADS)
        else:
            self.bias = biases.DISTANCE_BIASES[bias](HEADS)

    def forward(self, x: Tensor, cache: KVCache | None) -> Tensor:
        """Of hidden states (B, N, DIM): a whole sequence or, with a cache, its next tokens."""
        heads = self.project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        bias = self.bias(x) if self.of_content else self.bias
        if cache is None:
            o = biased_flash_attn(q, k, v, bias, window=self.window)
        else:
            o = biased_flash_attn_with_kvcache(q, cache, k, v, bias)
        return self.out(o.transpose(1, 2).flatten(2))

    def cache(self, batch: int) -> KVCache:
        return KVCache(batch, KV_HEADS, HEAD_DIM, window=self.window)


class Model(nn.Module):
    """A transformer of bytes; positions are known from the bias alone."""

    def __init__(self, bias: str, window: int | None):
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.attention = nn.ModuleList(Attention(bias, window) for _ in range(LAYERS))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))
            for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * LAYERS + 1))
        self.head = nn.Linear(DIM, 256)

    def forward(self, tokens: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        """Logits (B, N, 256) of the bytes that follow tokens (B, N)."""
        x = self.embedding(tokens)
        for n, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * n](x), caches and caches[n])
            x = x + mlp(self.norms[2 * n + 1](x))
        return self.head(self.norms[-1](x))

    def caches(self, batch: int) -> list[KVCache]:
        return [attention.cache(batch) for attention in self.attention]


def train(model: Model, text: Tensor, steps: int, length: int = 128, batch: int = 8) -> float:
    """Returns the loss of the last step, in nats a byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.tensor(torch.nan)
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (batch, 1))
        window = text[starts + torch.arange(length + 1)]
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def generate(model: Model, prompt: Tensor, tokens: int, temperature: float = 0.7) -> Tensor:
    """The prompt (N,) and what follows it. Each step is compared with a full forward pass."""
    caches = model.caches(batch=1)
    sequence = prompt[None]
    logits = model(sequence, caches)  # the whole prompt at once
    for _ in range(tokens):
        torch.testing.assert_close(logits[:, -1], model(sequence)[:, -1], rtol=1e-4, atol=1e-4)
        following = torch.multinomial((logits[:, -1] / temperature).softmax(-1), 1)
        sequence = torch.cat([sequence, following], 1)
        logits = model(following, caches)  # one token
    return sequence[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("biases", nargs="*", metavar="BIAS", help=f"some of {', '.join(BIASES)}")
    parser.add_argument("--window", type=int, help="see the last keys only, in a sliding cache")
    parser.add_argument("--steps", type=int, default=150, help="of training")
    parser.add_argument("--tokens", type=int, default=200, help="to generate")
    options = parser.parse_args()
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    for name in options.biases or BIASES:
        if name not in BIASES:
            parser.error(f"bias is {name}; it may be {', '.join(BIASES)}")
        torch.manual_seed(0)
        model = Model(name, options.window)
        loss = train(model, text, options.steps)
        generated = generate(model, text[:32], options.tokens)
        print(f"--- {name}: loss {loss:.2f}, {options.tokens} tokens with equal logits")
        print(bytes(generated.tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
