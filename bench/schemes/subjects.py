"""Language models that differ only in their position scheme: GPT-tiny of Veisi et al. (2025)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from biased_flash_attn.nn import CausalLM

VOCABULARY = 1024  # small, as embeddings are irrelevant to schemes
LAYERS, DIM, HEADS = 6, 512, 8


def model(scheme: str, length: int) -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(VOCABULARY, DIM, LAYERS, HEADS, scheme, max_length=length)


class Training:
    """A call computes the loss of one sequence and all gradients."""

    def __init__(self, scheme: str, length: int):
        self.model = model(scheme, length)
        self.tokens = torch.randint(VOCABULARY, (1, length + 1))

    def __call__(self) -> Tensor:
        self.model.zero_grad()
        logits = self.model(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[0, 1:])
        loss.backward()
        return loss.detach()


class Generation:
    """A call continues a prompt by `new` tokens, one at a time."""

    def __init__(self, scheme: str, prompt: int, new: int):
        self.model = model(scheme, prompt + new)
        self.prompt, self.new = torch.randint(VOCABULARY, (1, prompt)), new

    def __call__(self) -> Tensor:
        return self.model.generate(self.prompt, self.new)
