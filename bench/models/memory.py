"""Prints the MiB by which a process grows in a pass forward and backward through a model.

Usage: python -m bench.cpu.model_memory MODEL LENGTH accelerated|eager
"""

import sys

import torch

from bench.common.measure import THREADS
from bench.cpu.models import Training
from biased_flash_attn.cli.cost import cost

name, length, side = sys.argv[1:]
torch.set_num_threads(THREADS)
accelerated = side == "accelerated"
Training(name, 64, alone=False, accelerated=accelerated)()  # initializes libraries
training = Training(name, int(length), alone=False, accelerated=accelerated)
print(cost(training).mebibytes)
