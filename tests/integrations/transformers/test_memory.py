"""T5 on this package needs memory proportional to the number of tokens, with any padding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MEASURE = """
import sys

import torch
from transformers import T5Config, T5ForConditionalGeneration

from biased_flash_attn.cli.cost import cost
from biased_flash_attn.integrations.transformers import accelerate

torch.set_num_threads(2)
config = T5Config(vocab_size=64, d_model=64, d_kv=32, d_ff=64, num_heads=2, num_layers=2,
                  dropout_rate=0.0, decoder_start_token_id=0)
model = accelerate(T5ForConditionalGeneration(config))

def train(length):
    ids, mask = torch.randint(2, 64, (1, length)), torch.ones(1, length).long()
    mask[:, length - 100 :] = 0
    model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()

train(256)
print(cost(lambda: train(int(sys.argv[1]))).mebibytes)
"""


def peak(length: int) -> float:
    """The MiB that a training step adds, in a separate process."""
    command = [sys.executable, "-c", MEASURE, str(length)]
    # glibc then returns a tensor's pages when it is freed. Otherwise, its caching and fragmentation
    # vary between runs by some 10 %.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return float(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_t5_is_linear_in_the_tokens():
    """A dense bias of an encoder would take 128 MiB, and a mask of pairs at least 16 MiB."""
    short, long = peak(2048), peak(4096)
    assert long <= 2.1 * short, f"{short} MiB for 2048 tokens, {long} MiB for 4096"
    assert long <= 96, f"{long} MiB"
