"""Small models of transformers with random weights, and batches with padding."""

from __future__ import annotations

import copy
from functools import partial

import torch
import transformers
from torch import Tensor

from biased_flash_attn.integrations.transformers import accelerate

VOCABULARY = 97


def decoder(name: str, implementation: str = "eager", **config):
    """The causal language model of a family. Weights are large enough for attention to choose."""
    config = getattr(transformers, f"{name}Config")(
        **{"vocab_size": VOCABULARY, "initializer_range": 0.15, "pad_token_id": 0, **config}
    )
    model = getattr(transformers, f"{name}ForCausalLM")
    return model._from_config(config, attn_implementation=implementation).eval()


def bloom(heads: int = 8, layers: int = 2, **config):
    return decoder("Bloom", hidden_size=8 * heads, n_layer=layers, n_head=heads, **config)


def mpt(heads: int = 8, layers: int = 2, **config):
    shape = {"d_model": 8 * heads, "n_layers": layers, "n_heads": heads, "max_seq_len": 1024}
    return decoder("Mpt", **shape, **config)


def falcon(heads: int = 8, layers: int = 2, head_dim: int = 8, **config):
    """With SDPA, transformers' default for it: its eager attention adds the bias twice."""
    config = {"multi_query": False, "parallel_attn": False, "alibi": True, **config}
    return decoder(
        "Falcon",
        "sdpa",
        hidden_size=head_dim * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        **config,
    )


def t5(family: str = "T5", heads: int = 4, layers: int = 2, **config):
    """Dropout stays at its default of 0.1 outside of attention, where eval() does without it."""
    defaults = {
        "vocab_size": VOCABULARY,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 64,
        "num_heads": heads,
        "num_layers": layers,
        "initializer_factor": 1.1,
        # Not relu, whose gradient jumps where rounding changes a sign.
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
    }
    config = getattr(transformers, f"{family}Config")(**{**defaults, **config})
    model = getattr(transformers, f"{family}ForConditionalGeneration")
    return model._from_config(config, attn_implementation="eager").eval()


DECODERS = {
    "bloom": bloom,
    "bloom, 12 heads": partial(bloom, 12),
    "mpt": mpt,
    "mpt, 6 heads": partial(mpt, 6),
    "falcon": falcon,
    "falcon, 12 heads": partial(falcon, 12),
    "falcon, multi-query": partial(falcon, multi_query=True),
    "falcon, new": partial(
        falcon, new_decoder_architecture=True, num_kv_heads=2, parallel_attn=True
    ),
}
ENCODER_DECODERS = {
    "t5": t5,
    "t5, 6 heads, gated": partial(t5, heads=6, feed_forward_proj="gated-gelu"),
    "mt5": partial(t5, "MT5"),
    "umt5": partial(t5, "UMT5"),
}


def accelerated(model):
    """A copy of the model that runs on this package."""
    return accelerate(copy.deepcopy(model))


def tokens(batch: int, length: int) -> Tensor:
    """None of them is padding or ends a text."""
    return torch.randint(3, VOCABULARY, (batch, length))


def lengths_mask(side: str, batch: int, length: int) -> Tensor | None:
    """An attention mask for sequences of different lengths, one of them without padding.

    side is where the padding is: "left", "right", "both", "between" tokens, or "none" for no mask.
    """
    if side == "none":
        return None
    if side == "between":
        mask = torch.rand(batch, length) < 0.6
        mask[:, [0, length // 2, -1]], mask[:, length // 3] = True, False
        return mask.long()
    count = torch.randint(length // 3, length, (batch, 1))
    count[0] = length
    first = {"left": length - count, "right": 0 * count, "both": (length - count) // 2}[side]
    position = torch.arange(length)
    return ((first <= position) & (position < first + count)).long()


def differentiated(model, inputs: dict, kept: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Logits (n, vocabulary) of the kept positions, and the gradients of all parameters."""
    logits = model(**inputs).logits[kept]
    generator = torch.Generator().manual_seed(0)
    logits.backward(torch.randn(logits.shape, generator=generator))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return logits.detach(), gradients
