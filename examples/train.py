"""Trains a small byte-level language model with a position bias, and tests longer contexts.

    python examples/train.py
    python examples/train.py kerple_log --steps 400 --length 256

The text is the Python source of the standard library and of PyTorch. Every model is trained with
the same seed on the same bytes. Finally the loss on test text is printed, at the training length
and at four times that.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import trange

from biased_flash_attn.biases import NAMED
from biased_flash_attn.extrapolation.experiment import read_text
from biased_flash_attn.nn import CausalLM, Positions

VOCABULARY, DIM, HEADS, KV_HEADS, LAYERS = 256, 64, 4, 2, 2


def small_model(positions: str | Positions) -> CausalLM:
    """A model with this position scheme and reproducible parameters."""
    torch.manual_seed(0)
    return CausalLM(VOCABULARY, DIM, LAYERS, HEADS, positions, kv_heads=KV_HEADS)


def train(model: CausalLM, text: Tensor, steps: int, length: int = 128) -> list[float]:
    """The loss of every step, in nats per byte. text is (T,) uint8."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in (progress := trange(steps, leave=False)):
        loss = loss_of(model, windows(text, length, batch=8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.2f}", refresh=False)
    return losses


def windows(text: Tensor, length: int, batch: int) -> Tensor:
    """Random windows of the text, (batch, length + 1): inputs, and the byte after each of them."""
    starts = torch.randint(len(text) - length, (batch, 1))
    return text[starts + torch.arange(length + 1)].long()


def loss_of(model: CausalLM, window: Tensor) -> Tensor:
    return F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "biases",
        nargs="*",
        metavar="BIAS",
        help=f"some of {', '.join(NAMED)}; alibi and cable by default",
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--length", type=int, default=128, help="training length in bytes")
    options = parser.parse_args()
    for name in options.biases:
        if name not in NAMED:
            parser.error(f"bias is {name}; it may be {', '.join(NAMED)}")
    text = read_text()
    for name in options.biases or ("alibi", "cable"):
        model = small_model(name)
        losses = train(model, text.train, options.steps, options.length)
        first, last = losses[0], sum(losses[-10:]) / len(losses[-10:])
        print(f"{name}: loss {first:.2f} at the first step, {last:.2f} over the last ten")
        assert last < 0.7 * first, "the model did not learn"
        with torch.no_grad():
            for length in (options.length, 4 * options.length):
                loss = loss_of(model, windows(torch.cat(text.test), length, batch=16)).item()
                print(f"{name}: loss {loss:.2f} on test text at length {length}")


if __name__ == "__main__":
    main()
