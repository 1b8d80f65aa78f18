"""The measured models of transformers, complete or reduced to their attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from biased_flash_attn.integrations.transformers import accelerate

VOCABULARY = 1024  # small, as embeddings are irrelevant to attention


def model(name: str, **config) -> PreTrainedModel:
    """A model with random weights, and with the attention that transformers chooses for it."""
    kind = getattr(transformers, name)
    return kind._from_config(kind.config_class(vocab_size=VOCABULARY, **config))


def t5(name: str, layers: int, **config) -> PreTrainedModel:
    """The shape of T5-base."""
    shape = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12, "num_layers": layers}
    return model(name, **shape, dropout_rate=0.0, **config)


def mpnet(layers: int, length: int) -> PreTrainedModel:
    """The shape of MPNet-base, which ends at 514 positions, of which two are no tokens'."""
    positions = {"max_position_embeddings": length + 2, "attention_probs_dropout_prob": 0.0}
    return model("MPNetModel", num_hidden_layers=layers, **positions)


def pix2struct_text(layers: int) -> PreTrainedModel:
    """The decoder of Pix2Struct-base, without its prediction of words."""
    own = model("Pix2StructTextModel", num_layers=layers, dropout_rate=0.0, initializer_range=0.02)
    own.lm_head = nn.Identity()
    return own


def inkling(name: str, layers: int) -> PreTrainedModel:
    """The heads of Inkling-Small, a quarter of them, and small experts."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    sliding = {f"swa_{key}": value for key, value in heads.items()}
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 16, "n_routed_experts": 1}
    kinds = ["hybrid_sliding"] * (layers - 1) + ["hybrid"]
    experts = {"num_experts_per_tok": 1, "unpadded_vocab_size": VOCABULARY}
    experts["eos_token_id"] = 2
    return model(
        name, num_hidden_layers=layers, layer_types=kinds, **heads, **sliding, **sizes, **experts
    )


def words(length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, VOCABULARY, (1, length))}


def words_with_fractions_of_a_page(length: int) -> dict[str, Tensor]:
    corners = torch.rand(1, length, 2) / 2
    return {**words(length), "bbox": torch.cat([corners, corners + 0.1], 2)}


def words_with_places_on_a_page(length: int) -> dict[str, Tensor]:
    corners = torch.randint(500, (1, length, 2))
    return {**words(length), "bbox": torch.cat([corners, corners + 100], 2)}


@dataclass(frozen=True)
class Subject:
    """A model of a family, and the length at which its attention is measured."""

    family: str  # its name in the documentation
    shape: str
    make: Callable[[], PreTrainedModel]
    length: int
    inputs: Callable[[int], dict[str, Tensor]] = words
    spread: float = 1.0  # the standard deviation of queries and keys


# Makes up for the scale of logits that T5 lacks.
UNSCALED = 64**-0.25
SUBJECTS = {
    "bloom": Subject(
        "BLOOM",
        "BLOOM-560M, 2 layers",
        partial(model, "BloomModel", hidden_size=1024, n_layer=2, n_head=16),
        2048,
    ),
    "mpt": Subject(
        "MPT",
        "16 heads, 2 layers",
        partial(model, "MptModel", d_model=1024, n_layers=2, n_heads=16, max_seq_len=2048),
        2048,
    ),
    "falcon": Subject(
        "Falcon with ALiBi",
        "16 heads, 2 layers",
        partial(
            model,
            "FalconModel",
            hidden_size=1024,
            num_hidden_layers=2,
            num_attention_heads=16,
            alibi=True,
            multi_query=False,
            parallel_attn=False,
        ),
        2048,
    ),
    "t5": Subject(
        "T5, mT5, UMT5, Switch Transformers, Pop2Piano",
        "T5-base's encoder, 2 layers",
        partial(t5, "T5EncoderModel", 2),
        4096,
        spread=UNSCALED,
    ),
    "udop": Subject(
        "UDOP",
        "UDOP's encoder in the shape of T5-base, 12 layers",
        partial(t5, "UdopEncoderModel", 12, image_size=224, num_channels=3),
        512,
        words_with_fractions_of_a_page,
        UNSCALED,
    ),
    "layoutlmv3": Subject(
        "LayoutLMv3",
        "LayoutLMv3-base, 12 layers",
        partial(model, "LayoutLMv3Model", visual_embed=False, max_position_embeddings=514),
        512,
        words_with_places_on_a_page,
    ),
    "longt5": Subject(
        "LongT5",
        "LongT5-base's transient-global encoder, 2 layers",
        partial(t5, "LongT5EncoderModel", 2, encoder_attention_type="transient-global"),
        4096,
        spread=UNSCALED,
    ),
    "pix2struct": Subject(
        "Pix2Struct",
        "Pix2Struct-base's decoder, 2 layers",
        partial(pix2struct_text, 2),
        2048,
        spread=UNSCALED,
    ),
    "mpnet": Subject("MPNet", "MPNet-base, 12 layers", partial(mpnet, 12, 512), 512),
    "inkling": Subject(
        "Inkling",
        "8 heads of 128, a layer with a window and one without",
        partial(inkling, "InklingTextModel", 2),
        2048,
    ),
    "inkling2": Subject(
        "Inkling 2",
        "8 heads of 128, a layer with a window and one without",
        partial(inkling, "Inkling2TextModel", 2),
        2048,
    ),
}


class Given(nn.Module):
    """Replaces a linear layer: returns fixed rows (N, out), which are trained.

    An input of the same width is added, as otherwise no gradient would reach earlier layers.
    """

    def __init__(self, layer: nn.Linear, rows: Tensor, spread: float):
        super().__init__()
        self.weight, self.spread = nn.Parameter(spread * rows), spread
        self.adds_input = layer.in_features == layer.out_features

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight[: x.shape[-2]].expand(*x.shape[:-1], -1)
        return rows + self.spread * x if self.adds_input else rows


def reduce_to_attention(model: PreTrainedModel, length: int, spread: float) -> None:
    """Replaces linear layers of hidden states, which take most of the time outside of attention.

    What they return is as wide as before where attention or the residual stream need it.
    """
    names = [name for name, x in model.named_modules() if "Attention" in type(x).__name__]
    linear = {name: x for name, x in model.named_modules() if isinstance(x, nn.Linear)}
    for name, layer in linear.items():
        if layer.in_features < model.config.hidden_size:
            continue
        needed = name.startswith(tuple(f"{x}." for x in names))
        needed |= layer.out_features == model.config.hidden_size
        rows = torch.randn(length, layer.out_features if needed else 1)
        model.set_submodule(name, Given(layer, rows, spread))


ENCODERS = {"mpnet": partial(mpnet, 12), "t5": lambda length: t5("T5EncoderModel", 12)}


class Encoding:
    """A call runs a complete encoder of 12 layers, without gradients."""

    def __init__(self, name: str, length: int, *, accelerated: bool, batch: int = 1):
        torch.manual_seed(0)
        self.model = ENCODERS[name](length).eval()
        self.ids = torch.randint(3, VOCABULARY, (batch, length))
        if accelerated:
            accelerate(self.model)

    def __call__(self) -> Tensor:
        with torch.inference_mode():
            return self.model(self.ids).last_hidden_state


class Training:
    """A call runs a training step of a model, reduced to its attention."""

    def __init__(self, name: str, length: int, *, accelerated: bool):
        torch.manual_seed(0)
        subject = SUBJECTS[name]
        self.model = subject.make().train()
        for module in self.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        reduce_to_attention(self.model, length, subject.spread)
        self.inputs = subject.inputs(length)
        self.grad: Tensor | None = None
        if accelerated:
            accelerate(self.model)

    def __call__(self) -> dict[str, Tensor]:
        self.model.zero_grad()
        o = self.model(**self.inputs)[0]
        if self.grad is None:
            self.grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
        o.backward(self.grad)
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        return {"o": o.detach(), **{name: x for name, x in gradients.items() if x is not None}}
