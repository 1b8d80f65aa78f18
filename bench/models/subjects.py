"""The measured models of transformers, complete or reduced to their attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomModel, PreTrainedModel, T5Config, T5EncoderModel

from biased_flash_attn.integrations.transformers import accelerate

LAYERS = 4
VOCABULARY = 1024  # small, as embeddings are irrelevant to attention


@dataclass(frozen=True)
class Subject:
    """A model, its length, and the function that reduces it to its attention."""

    make: Callable[[], PreTrainedModel]
    length: int
    heads: int
    dim: int  # of hidden states
    reduce: Callable[[PreTrainedModel, int], None]


class Given(nn.Module):
    """Replaces a projection: returns fixed rows (1, N, dim), which are trained."""

    def __init__(self, rows: Tensor):
        super().__init__()
        self.rows = nn.Parameter(rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows


class Residual(nn.Module):
    """Replaces an MLP by the identity."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x if residual is None else residual


def bloom() -> BloomModel:
    """The shape of BLOOM-560M, with fewer layers."""
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=1024, n_head=16, n_layer=LAYERS)
    return BloomModel._from_config(config, attn_implementation="eager")


def t5_encoder() -> T5EncoderModel:
    """The shape of T5-base's encoder, with fewer layers."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=768,
        d_kv=64,
        d_ff=3072,
        num_heads=12,
        num_layers=LAYERS,
        dropout_rate=0.0,
    )
    return T5EncoderModel._from_config(config, attn_implementation="eager")


def reduce_bloom(model: BloomModel, length: int) -> None:
    model.word_embeddings_layernorm = model.ln_f = nn.Identity()
    for block in model.h:
        block.input_layernorm = block.post_attention_layernorm = nn.Identity()
        block.mlp = Residual()
        block.self_attention.query_key_value = Given(torch.randn(1, length, 3 * 1024))
        block.self_attention.dense = nn.Identity()


def reduce_t5_encoder(model: T5EncoderModel, length: int) -> None:
    """Scales q and k such that their products have a variance of 1 without T5's missing scale."""
    encoder = model.encoder
    encoder.final_layer_norm = nn.Identity()
    for block in encoder.block:
        attention = block.layer[0].SelfAttention
        block.layer[0].layer_norm = nn.Identity()
        block.layer[1] = Residual()
        for name in ("q", "k", "v"):
            rows = torch.randn(1, length, 768)
            setattr(attention, name, Given(rows if name == "v" else rows / 64**0.25))
        attention.o = nn.Identity()


SUBJECTS = {
    "bloom": Subject(bloom, 2048, 16, 1024, reduce_bloom),
    "t5_encoder": Subject(t5_encoder, 4096, 12, 768, reduce_t5_encoder),
}


class Training:
    """A call runs hidden states forward and backward through a model."""

    def __init__(self, name: str, length: int, *, alone: bool, accelerated: bool):
        torch.manual_seed(0)
        subject = SUBJECTS[name]
        self.model = subject.make().train()
        if alone:
            subject.reduce(self.model, length)
        self.x, self.grad = torch.randn(2, 1, length, subject.dim)
        if accelerated:
            accelerate(self.model)

    def __call__(self) -> dict[str, Tensor]:
        self.model.zero_grad()
        o = self.model(inputs_embeds=self.x).last_hidden_state
        o.backward(self.grad)
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        return {"o": o.detach(), **{name: x for name, x in gradients.items() if x is not None}}
