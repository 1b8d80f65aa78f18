"""Small models of transformers with random weights, and batches with padding."""

from __future__ import annotations

import copy
from functools import partial

import torch
import transformers
from torch import Tensor

from tests.support.layers import Adapted
from tests.support.numerics import assert_same_model

VOCABULARY = 97


def decoder(name: str, implementation: str = "eager", **config):
    """The causal language model of a family, with weights large enough for uneven attention."""
    model = getattr(transformers, f"{name}ForCausalLM")
    config = model.config_class(
        **{"vocab_size": VOCABULARY, "initializer_range": 0.15, "pad_token_id": 0, **config}
    )
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


def t5(
    family: str = "T5",
    heads: int = 4,
    layers: int = 2,
    head: str = "ConditionalGeneration",
    **config,
):
    """Dropout outside of attention has its default of 0.1; eval() disables it."""
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
    model = getattr(transformers, f"{family}For{head}")
    return model._from_config(config, attn_implementation="eager").eval()


def mpnet(head: str = "MaskedLM", heads: int = 6, layers: int = 2, **config):
    """Dropout outside of attention has its default of 0.1; eval() disables it."""
    defaults = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8 * heads,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "attention_probs_dropout_prob": 0.0,
    }
    config = transformers.MPNetConfig(**{**defaults, **config})
    model = getattr(transformers, f"MPNet{head}" if head == "Model" else f"MPNetFor{head}")
    return model._from_config(config, attn_implementation="eager").eval()


def inkling(family: str = "Inkling", **config):
    return decoder(family, **inkling_config(family, **config))


def inkling2(**config):
    """Without the zeros of initialization, by which queries, keys and values have equal inputs."""
    model = inkling("Inkling2", **config)
    for name, parameter in model.named_parameters():
        if name.endswith((".query", ".static_weight")):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def inkling_config(family: str, layers: int = 3, **config) -> dict:
    """Layers with a window, then one without; the bands of both are shorter than most inputs.

    Full layers scale logits from position 10 on, and many vectors of Inkling 2 are clipped.
    """
    shared = {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "layer_types": ["hybrid_sliding"] * (layers - 1) + ["hybrid"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "swa_num_attention_heads": 6,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 12,
        "sliding_window_size": 11,
        "d_rel": 4,
        "rel_extent": 17,
        "log_scaling_n_floor": 10,
        "log_scaling_alpha": 0.4,
        "moe_intermediate_size": 16,
        # All experts are active, since rounding may change the choice.
        "n_routed_experts": 4,
        "num_experts_per_tok": 4,
        "route_scale": 1.0,
        # Normalization would magnify the rounding of vectors close to 0.
        "rms_norm_eps": 1e-2,
        "unpadded_vocab_size": VOCABULARY,
        "eos_token_id": 2,
    }
    own = {
        "Inkling": {"logits_mup_width_multiplier": 1.0},
        "Inkling2": {"qk_l2_clip_threshold": 2.0, "rel_l2_clip_threshold": 1.0},
    }
    return shared | own[family] | config


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
# Their positions count padding between tokens, which is not supported.
INKLINGS = {
    "inkling": inkling,
    "inkling, not scaled": partial(inkling, log_scaling_n_floor=None),
    "inkling 2": inkling2,
}
ENCODER_DECODERS = {
    "t5": t5,
    "t5, 6 heads, gated": partial(t5, heads=6, feed_forward_proj="gated-gelu"),
    "mt5": partial(t5, "MT5"),
    "umt5": partial(t5, "UMT5"),
    # A single expert, since rounding may change the choice.
    "switch": partial(
        t5, "SwitchTransformers", num_experts=1, num_decoder_layers=2, dense_act_fn="gelu_new"
    ),
    "longt5": partial(t5, "LongT5", local_radius=15),
}


def inputs_of(model, batch: int, length: int, mask: Tensor | None = None) -> dict:
    """Random inputs; those of an encoder and a decoder have the same padding."""
    inputs = {"input_ids": tokens(batch, length), "attention_mask": mask}
    if model.config.is_encoder_decoder:
        inputs |= {"decoder_input_ids": tokens(batch, length), "decoder_attention_mask": mask}
    return inputs


def kept_by(mask: Tensor | None, batch: int, length: int) -> Tensor:
    """Which positions are tokens, (batch, length) bool."""
    return torch.ones(batch, length, dtype=torch.bool) if mask is None else mask.bool()


# Importing the package's module takes seconds, too long where tests are only collected.
def accelerate(model):
    from biased_flash_attn.integrations import transformers as ours

    return ours.accelerate(model)


def unaccelerate(model):
    from biased_flash_attn.integrations import transformers as ours

    return ours.unaccelerate(model)


def accelerated(model):
    """A copy of the model that runs on this package."""
    return accelerate(copy.deepcopy(model))


def with_adapters(model):
    """The model with adapters of its tables of distances."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name.endswith("relative_attention_bias"):
                setattr(module, name, Adapted(child))
    return model


def tokens(batch: int, length: int) -> Tensor:
    """Random tokens, none of which is padding or ends a text."""
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


def in_bfloat16(model):
    """In bfloat16, except for parameters that transformers loads in float32."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.bfloat16()
    return model


def assert_closer_to_float32(model, inputs: dict) -> None:
    """Hidden states in bfloat16 are closer with our attention than with the model's own."""
    half = in_bfloat16(model)
    ours, full = accelerated(half), copy.deepcopy(half).float()
    with torch.no_grad():
        exact = full(**inputs).last_hidden_state
        error, theirs = (
            (m(**inputs).last_hidden_state - exact).norm().item() for m in (ours, half)
        )
    assert error < theirs


def assert_same_steps(actual, expected) -> None:
    """Sequences and logits are equal, up to the first tie, after which texts may differ."""
    same = torch.ones(len(actual.sequences), dtype=torch.bool)
    first = actual.sequences.shape[1] - len(actual.logits)
    assert actual.sequences.shape == expected.sequences.shape
    for step, (logits, theirs) in enumerate(zip(actual.logits, expected.logits, strict=True)):
        assert_same_model(logits[same], theirs[same], f"logits of step {step}")
        chosen, other = (x.sequences[:, first + step, None] for x in (actual, expected))
        tied = theirs.gather(1, chosen)[same]
        assert_same_model(tied, theirs.gather(1, other)[same], f"logit chosen in step {step}")
        same &= (chosen == other)[:, 0]
    assert same.any()
