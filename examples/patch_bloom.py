"""Runs a BLOOM of transformers on this package, trains it, and compares it with the original.

    python examples/patch_bloom.py
    python examples/patch_bloom.py --steps 300 --tokens 200

The model is a small byte-level model with random weights; nothing is downloaded. It is trained on
the text of this package's README. Loss, gradients and the continuations of two prompts of different
lengths equal those of transformers' own attention.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM

from biased_flash_attn.integrations.transformers import accelerate

TEXT = Path(__file__).parents[1] / "README.md"
PADDING = 0


def train(model: BloomForCausalLM, text: Tensor, steps: int, length: int, batch: int = 4) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        starts = torch.randint(len(text) - length, (batch, 1))
        window = text[starts + torch.arange(length)]
        loss = model(input_ids=window, labels=window).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.3f} nats per byte")


def compare_training(ours: BloomForCausalLM, eager: BloomForCausalLM, window: Tensor) -> None:
    for model in (ours, eager):
        model.zero_grad()
        model(input_ids=window, labels=window).loss.backward()
    difference = max(
        ((p.grad - q.grad).norm() / q.grad.norm()).item()
        for p, q in zip(ours.parameters(), eager.parameters(), strict=True)
    )
    assert difference < 1e-4, f"gradients differ by {difference:.2g}"
    print(f"gradients of all parameters: relative difference {difference:.1e}")


def compare_generation(
    ours: BloomForCausalLM, eager: BloomForCausalLM, prompts: list[bytes], tokens: int
) -> None:
    """Prompts of different lengths are padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[PADDING] * (longest - len(p)) + list(p) for p in prompts])
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": PADDING}
    options |= {"attention_mask": (ids != PADDING).long(), "eos_token_id": None}
    generated = ours.generate(ids, **options)
    same = (generated == eager.generate(ids, **options)).float().mean().item()
    with torch.no_grad():
        mask = torch.nn.functional.pad(options["attention_mask"], (0, tokens), value=1)
        logits, expected = (m(generated, attention_mask=mask).logits for m in (ours, eager))
    is_token = mask.bool()
    torch.testing.assert_close(logits[is_token], expected[is_token], rtol=1e-4, atol=1e-4)
    print(f"{tokens} tokens after each prompt: {same:.0%} are those of eager attention")
    for row in generated:
        print("---", bytes(row[row != PADDING].tolist()).decode(errors="replace"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate")
    options = parser.parse_args()
    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    config = BloomConfig(vocab_size=256, hidden_size=128, n_layer=2, n_head=4)
    model = accelerate(BloomForCausalLM(config))
    train(model, text, options.steps, length=256)

    eager = BloomForCausalLM(config)
    eager.load_state_dict(model.state_dict())
    eager.eval(), model.eval()
    compare_training(model, eager, text[None, :512])
    compare_generation(model, eager, [b"Attention with ", b"The bias is "], options.tokens)


if __name__ == "__main__":
    main()
