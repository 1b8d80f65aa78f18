"""Prints the MiB by which a process grows in a pass forward and backward through a model.

Usage: model_memory.py MODEL LENGTH accelerated|eager
"""

import sys

import torch

from biased_flash_attn.cli.cost import cost
from measure import THREADS
from models import Training

name, length, side = sys.argv[1:]
torch.set_num_threads(THREADS)
accelerated = side == "accelerated"
Training(name, 64, alone=False, accelerated=accelerated)()  # initializes libraries
training = Training(name, int(length), alone=False, accelerated=accelerated)
print(cost(training).mebibytes)
