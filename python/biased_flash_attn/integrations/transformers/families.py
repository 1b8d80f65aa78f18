"""The models that `accelerate` supports, with the layers that it puts into them."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.models.cpmant import modeling_cpmant

from .bloom import FusedBloomAttention
from .falcon import FusedFalconAttention
from .inkling import (
    FusedInkling2FullAttention,
    FusedInkling2SlidingAttention,
    FusedInklingAttention,
    FusedInklingDecoderLayer,
)
from .layer import FusedLayer
from .layoutlmv3 import FusedLayoutLMv3SelfAttention
from .longt5 import FusedLongT5LocalAttention
from .longt5_blocks import FusedLongT5TransientGlobalAttention
from .mpnet import FusedMPNetEncoder, FusedMPNetSelfAttention
from .mpt import FusedMptAttention, FusedMptBlock
from .pix2struct import FusedPix2StructTextAttention
from .switch_transformers import FusedSwitchTransformersAttention
from .t5 import (
    FusedLongT5Attention,
    FusedMT5Attention,
    FusedPop2PianoAttention,
    FusedT5Attention,
    FusedUMT5Attention,
)
from .udop import FusedUdopAttention


@dataclass(frozen=True)
class Family:
    """Models with the same layers. The documentation has a table of these descriptions."""

    name: str
    layers: tuple[type[FusedLayer], ...]
    bias: str
    served: str


FAMILIES = (
    Family(
        "BLOOM",
        (FusedBloomAttention,),
        "slopes times distances that count tokens and not padding",
        "every head, `generate()`",
    ),
    Family(
        "MPT",
        (FusedMptBlock, FusedMptAttention),
        "slopes times distances that count padding too; slopes have a different order if the"
        " number of heads is not a power of two",
        "every head, `generate()`",
    ),
    Family(
        "Falcon with ALiBi",
        (FusedFalconAttention,),
        "slopes times positions among tokens, rounded to bfloat16 and added before scaling;"
        " results are those of SDPA, its default, as its eager attention adds the bias twice",
        "every head, `generate()`",
    ),
    Family(
        "T5, mT5, UMT5, Switch Transformers, Pop2Piano",
        (
            FusedT5Attention,
            FusedMT5Attention,
            FusedUMT5Attention,
            FusedSwitchTransformersAttention,
            FusedPop2PianoAttention,
        ),
        "a trained table of buckets of distances; logits are not scaled",
        "encoders, decoders and cross-attention, every head, `generate()`; except in Switch"
        " Transformers, nothing is computed for padding in encoders",
    ),
    Family(
        "UDOP",
        (FusedUdopAttention,),
        "the table of T5 in decoders; encoders add tables of the places of words on the page,"
        " which are expanded to a dense bias",
        "encoders, in O(N^2) memory for the bias, decoders and cross-attention, `generate()`",
    ),
    Family(
        "LayoutLMv3",
        (FusedLayoutLMv3SelfAttention,),
        "tables of the distances of positions and of places on the page, which transformers"
        " expands to a dense bias once for all layers and does not train",
        "every head, text and images, in O(N^2) memory for the bias",
    ),
    Family(
        "LongT5",
        (
            FusedLongT5LocalAttention,
            FusedLongT5TransientGlobalAttention,
            FusedLongT5Attention,
        ),
        "the table of T5, in encoders within a radius, and a second one of distances to blocks",
        "local and transient-global encoders, decoders and cross-attention, `generate()`",
    ),
    Family(
        "Pix2Struct",
        (FusedPix2StructTextAttention,),
        "the table of T5 in decoders",
        "decoders and cross-attention, `generate()`; encoders have no bias and keep their own"
        " attention",
    ),
    Family(
        "MPNet",
        (FusedMPNetEncoder, FusedMPNetSelfAttention),
        "a trained table of buckets of signed distances, which all layers share",
        "every head; nothing is computed for padding, in attention or elsewhere",
    ),
    Family(
        "Inkling",
        (FusedInklingDecoderLayer, FusedInklingAttention),
        "profiles of the distance that each query mixes; logits are divided by head_dim and not"
        " by its square root; in layers without a window, those of late queries are scaled",
        "text and multimodal models, `generate()`",
    ),
    Family(
        "Inkling 2",
        (FusedInkling2SlidingAttention, FusedInkling2FullAttention),
        "the same with the usual scale, clipped vectors, an attention sink of each query, and"
        " logits that `position_ids` scale",
        "text and multimodal models, `generate()`",
    ),
)

# The fused layer for each layer of transformers.
FUSED = {fused.__bases__[-1]: fused for family in FAMILIES for fused in family.layers}

# Layers with a bias that no layer of this package computes, and why.
REFUSED = {
    modeling_cpmant.CpmAntAttention: "CPM-Ant's bias and mask depend on the segments of each query"
    " and key, and not only on their distance"
}
