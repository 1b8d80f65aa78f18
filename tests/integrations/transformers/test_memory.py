"""T5 on this package needs memory proportional to the number of tokens, with any padding."""

from __future__ import annotations

import sys

import pytest

from tests.support.allocations import output_of

MEASURE = """
import torch
from transformers import T5Config, T5ForConditionalGeneration

from biased_flash_attn import backends
from biased_flash_attn.integrations.transformers import accelerate
from tests.support.allocations import peak_of

config = T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=64, num_heads=2, num_layers=2,
                  dropout_rate=0.0, decoder_start_token_id=0)
model = accelerate(T5ForConditionalGeneration(config))

def train(length):
    ids, mask = torch.randint(2, 64, (1, length)), torch.ones(1, length).long()
    mask[:, length - 100 :] = 0
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()

def peak(length):
    train(length)
    backends.release_memory()
    return peak_of(lambda: train(length)) / 2**20

print(peak(2048), peak(4096))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="preloads a library")
def test_memory_of_t5_is_linear_in_the_tokens(tmp_path):
    """A dense bias of an encoder would take 128 MiB, and a mask of pairs at least 16 MiB."""
    short, long = map(float, output_of(MEASURE, tmp_path).split())
    assert long <= 2.1 * short
    assert long <= 96
