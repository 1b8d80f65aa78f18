"""Embedding with MPNet: as sentence-transformers calls it, against its own attention.

The shape is that of all-mpnet-base-v2, with fewer layers. Texts of unequal length are padded to
the longest, as every batch is; the accelerated encoder computes nothing for the padding.
"""

import copy

import pytest
import torch
from torch import Tensor
from transformers import MPNetConfig, MPNetModel

from bench.common.measure import alternate, seconds
from biased_flash_attn.integrations.transformers import accelerate

LAYERS = 2
ROUNDS = 3


def batch(texts: int, length: int, *, equal: bool) -> dict[str, Tensor]:
    """Random tokens, in texts of uniformly distributed lengths or of one."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, length + 1, (texts,), generator=generator)
    lengths = torch.full_like(lengths, length) if equal else lengths
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    ids = torch.randint(3, 1024, (texts, length), generator=generator)
    return {"input_ids": torch.where(mask.bool(), ids, 1), "attention_mask": mask}


@pytest.mark.parametrize(
    ("texts", "length", "equal", "target"), [(32, 384, False, 1.5), (12, 512, True, 1.0)]
)
def test_embedding_is_faster(benchmark, record, texts, length, equal, target):
    torch.manual_seed(0)
    config = MPNetConfig(vocab_size=1024, max_position_embeddings=514, num_hidden_layers=LAYERS)
    own = MPNetModel(config).eval()
    ours, inputs = accelerate(copy.deepcopy(own)), batch(texts, length, equal=equal)
    kept = inputs["attention_mask"].bool()

    def embed(model) -> Tensor:
        with torch.inference_mode():
            return model(**inputs).last_hidden_state[kept]

    torch.testing.assert_close(embed(ours), embed(own), rtol=1e-4, atol=1e-4)
    mine, others = alternate(benchmark, lambda: embed(ours), seconds(lambda: embed(own)), ROUNDS)
    ratios = [other / m for m, other in zip(mine, others, strict=True)]
    kind = "of one length" if equal else f"of unequal length ({kept.float().mean():.0%} tokens)"
    work = f"embedding of {texts} texts {kind}, up to {length} tokens, MPNet-base, {LAYERS} layers"
    record(work, "float32", ratios, "x", ">=", target, mine, others)
