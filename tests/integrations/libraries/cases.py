"""Small models with random weights, saved in folders from which libraries load them."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from torch import nn

from tests.integrations.transformers.cases import bloom, mpnet, t5

# MPNet counts positions from the number of the padding on.
SPECIAL = ["<s>", "<pad>", "</s>", "[UNK]", "<mask>"]
WORDS = [*SPECIAL, *string.ascii_lowercase]
QUANTILES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
TOKENS = {"vocab_size": len(WORDS), "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}


def save(model: nn.Module, folder: Path) -> None:
    """With biases that are large enough to change every result."""
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.normal_(parameter, std=2)
    model.save_pretrained(folder)


def save_tokenizer(folder: Path, template: str, **options) -> None:
    """Of words that are letters."""
    import tokenizers
    import transformers

    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[(word, i) for i, word in enumerate(SPECIAL)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="[UNK]",
        mask_token="<mask>",
        model_max_length=500,
        **options,
    ).save_pretrained(folder)


def save_mpnet(folder: Path, head: str = "MaskedLM") -> None:
    save(mpnet(head, **TOKENS), folder)
    save_tokenizer(folder, "<s> $A </s>")


def save_t5(folder: Path, **config) -> None:
    save(t5(**TOKENS, **config), folder)
    save_tokenizer(folder, "$A </s>")


def save_bloom(folder: Path) -> None:
    save(bloom(**TOKENS), folder)
    save_tokenizer(folder, "$A", padding_side="left")


def save_chronos_t5(folder: Path) -> None:
    chronos = {
        "tokenizer_class": "MeanScaleUniformBins",
        "tokenizer_kwargs": {"low_limit": -5.0, "high_limit": 5.0},
        "context_length": 64,
        "prediction_length": 8,
        "n_tokens": 97,
        "n_special_tokens": 2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "use_eos_token": True,
        "model_type": "seq2seq",
        "num_samples": 3,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
    }
    save(t5(chronos_config=chronos), folder)


def save_chronos_bolt(folder: Path, **chronos) -> None:
    from chronos.chronos_bolt import ChronosBoltModelForForecasting

    defaults = {
        "context_length": 64,
        "prediction_length": 8,
        "input_patch_size": 4,
        "input_patch_stride": 4,
        "quantiles": QUANTILES,
        "use_reg_token": True,
    }
    config = t5(dense_act_fn="gelu_new").config
    config.chronos_config = defaults | chronos
    config.chronos_pipeline_class = "ChronosBoltPipeline"
    save(ChronosBoltModelForForecasting(config), folder)


def texts(*lengths: int) -> list[str]:
    """Random words."""
    return [
        " ".join(WORDS[int(i)] for i in torch.randint(len(SPECIAL), len(WORDS), (n,)))
        for n in lengths
    ]
