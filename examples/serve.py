"""Serves a small byte-level model: prompts of different lengths in one batch, with a KV cache.

    python examples/serve.py kerple_log
    python examples/serve.py --window 64 --tokens 400 alibi cable

The model is that of train.py. The prompts are padded on the right and processed in one call; the
caches then drop the padding, and every step adds one byte to each sequence. At each step the logits
are compared with those of a forward pass over all bytes so far, one sequence at a time: training
and decoding use the same layers, and sequences do not affect one another.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from train import small_model, train

from biased_flash_attn.biases import NAMED
from biased_flash_attn.extrapolation.experiment import read_text
from biased_flash_attn.nn import CausalLM, positions

PROMPTS = ("def read(self", "import os\nimport sys\n\nclass ", "#")


@torch.no_grad()
def serve(
    model: CausalLM, prompts: list[Tensor], tokens: int, temperature: float = 0.7
) -> list[Tensor]:
    """Each prompt (N,) with its continuation."""
    caches = model.make_caches(len(prompts))
    lengths = [len(prompt) for prompt in prompts]
    logits = model(pad_sequence(prompts, batch_first=True), caches)
    logits = torch.stack([row[n - 1] for row, n in zip(logits, lengths, strict=True)])
    for cache in caches:
        cache.truncate(lengths)
    sequences = list(prompts)
    for _ in trange(tokens, leave=False):
        check(model, sequences, logits)
        following = torch.multinomial((logits / temperature).softmax(-1), 1)
        sequences = [torch.cat(pair) for pair in zip(sequences, following, strict=True)]
        logits = model(following, caches)[:, -1]
    return sequences


def check(model: CausalLM, sequences: list[Tensor], logits: Tensor) -> None:
    """Compares the logits after each sequence with those of a full forward pass."""
    full = torch.stack([model(sequence[None])[0, -1] for sequence in sequences])
    torch.testing.assert_close(logits, full, rtol=1e-4, atol=1e-4)


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
