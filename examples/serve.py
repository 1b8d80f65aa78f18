"""Serves a small byte-level model: prompts of different lengths in one batch, with a KV cache.

    python examples/serve.py kerple_log
    python examples/serve.py --window 64 --tokens 400 alibi cable

The model is that of train.py. `generate` processes the prompts in one call, with padding, and adds
one byte to each sequence in every step. The logits of all steps are then compared with those of a
forward pass over each finished sequence alone: training and decoding use the same layers, and
sequences do not affect one another.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from train import small_model, train

from biased_flash_attn.biases import NAMED
from biased_flash_attn.extrapolation.experiment import read_text
from biased_flash_attn.nn import CausalLM, positions

PROMPTS = ("def read(self", "import os\nimport sys\n\nclass ", "#")


def serve(model: CausalLM, prompts: list[Tensor], tokens: int) -> list[Tensor]:
    """Each prompt (N,) with its continuation."""
    padded = pad_sequence(prompts, batch_first=True)  # with zeros, which no prompt contains
    steps = []
    with model.head.register_forward_hook(lambda head, states, logits: steps.append(logits)):
        generated = model.generate(padded, tokens, key_padding_mask=padded != 0, temperature=0.7)
    continuations = generated[:, padded.shape[1] :]
    sequences = [torch.cat(pair) for pair in zip(prompts, continuations, strict=True)]
    check(model, sequences, torch.stack(steps, 1))
    return sequences


@torch.no_grad()
def check(model: CausalLM, sequences: list[Tensor], logits: Tensor) -> None:
    """Compares the logits (B, tokens, vocabulary) of the last tokens of each sequence with those of
    a full forward pass."""
    for sequence, steps in zip(sequences, logits, strict=True):
        full = model(sequence[None, :-1])[0, -len(steps) :]
        torch.testing.assert_close(steps, full, rtol=1e-4, atol=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("biases", nargs="*", metavar="BIAS", help=f"some of {', '.join(NAMED)}")
    parser.add_argument(
        "--window", type=int, help="attend to the last keys only, with a sliding cache"
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to generate")
    options = parser.parse_args()
    for name in options.biases:
        if name not in NAMED:
            parser.error(f"bias is {name}; it may be {', '.join(NAMED)}")
    text = read_text().train
    prompts = [torch.tensor(list(prompt.encode())) for prompt in PROMPTS]
    for name in options.biases or NAMED:
        model = small_model(replace(positions(name), window=options.window))
        loss = train(model, text, options.steps)[-1]
        print(f"--- {name}: loss {loss:.2f}")
        for sequence in serve(model, prompts, options.tokens):
            print(repr(bytes(sequence.tolist()).decode(errors="replace")))
        print(f"{options.tokens} steps with equal logits")


if __name__ == "__main__":
    main()
