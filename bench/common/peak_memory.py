"""Prints the MiB that a pass needs beyond inputs, outputs and gradients.

It runs in a separate process, because memory freed earlier would hide what a pass needs.

Usage: python -m bench.common.peak_memory BIAS DTYPE LENGTH DIRECTION

DIRECTION is "forward", without gradients, or "both", forward and backward.
"""

import sys

import torch

from bench.common import implementations, relative
from bench.common.layer import draw
from bench.common.measure import THREADS
from biased_flash_attn.cli.cost import cost

bias, dtype_name, length, direction = sys.argv[1:]
dtype = getattr(torch, dtype_name)
torch.set_num_threads(THREADS)
ours = relative.ours if bias in relative.MAKE else implementations.ours
ours(draw(64, dtype), bias)()  # initializes libraries

training = ours(draw(int(length), dtype), bias)
results = training.leaves["v"].nbytes
if direction == "both":
    results += sum(leaf.nbytes for leaf in training.leaves.values())
needed = cost(training if direction == "both" else training.forward)
print(needed.mebibytes - results / 2**20)
