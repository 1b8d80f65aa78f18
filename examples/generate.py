"""Generates text with a KV cache, from a small model of bytes with any of the biases.

    python examples/generate.py kerple_log
    python examples/generate.py --window 64 --tokens 400 alibi cable

The model learns from the text of this package's README for a few seconds. Then it continues a
prompt, one token at a time, and at every step its logits are compared with those of a forward pass
over all tokens so far: the same layers train and decode.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from biased_flash_attn.nn import BIASES, CausalLM, positions

VOCABULARY, DIM, HEADS, KV_HEADS, LAYERS = 256, 64, 4, 2, 2
TEXT = Path(__file__).parents[1] / "README.md"


def train(model: CausalLM, text: Tensor, steps: int, length: int = 128, batch: int = 8) -> float:
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
def generate(model: CausalLM, prompt: Tensor, tokens: int, temperature: float = 0.7) -> Tensor:
    """The prompt (N,) and what follows it. Each step is compared with a full forward pass."""
    caches = model.make_caches(batch=1)
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
        scheme = replace(positions(name), window=options.window)
        model = CausalLM(VOCABULARY, DIM, LAYERS, HEADS, scheme, kv_heads=KV_HEADS)
        loss = train(model, text, options.steps)
        generated = generate(model, text[:32], options.tokens)
        print(f"--- {name}: loss {loss:.2f}, {options.tokens} tokens with equal logits")
        print(bytes(generated.tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
