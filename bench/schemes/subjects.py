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


class Decoding:
    """A call decodes `new` tokens of one sequence after a prompt, which is in the caches before."""

    def __init__(self, scheme: str, prompt: int, new: int):
        self.model = model(scheme, prompt + new).eval()
        self.prompt, self.tokens = prompt, torch.randint(VOCABULARY, (1, new))
        self.caches = self.model.make_caches(1)
        with torch.no_grad():
            self.model(torch.randint(VOCABULARY, (1, prompt)), self.caches)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        for cache in self.caches:
            cache.truncate([self.prompt])
        logits = [self.model(token, self.caches) for token in self.tokens.split(1, 1)]
        return torch.cat(logits, 1)
