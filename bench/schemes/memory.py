"""Prints the MiB by which a process grows in a training step of a model.

It runs in a separate process, because memory freed earlier would hide what a step needs.

Usage: python -m bench.schemes.memory SCHEME LENGTH
"""

import sys

import torch

from bench.common.measure import THREADS, printed_by
from bench.schemes.subjects import Training
from biased_flash_attn.cli.cost import cost


def needed(scheme: str, length: int) -> float:
    return printed_by("bench.schemes.memory", scheme, str(length))


if __name__ == "__main__":
    scheme, length = sys.argv[1:]
    torch.set_num_threads(THREADS)
    Training(scheme, 64)()  # initializes libraries
    print(cost(Training(scheme, int(length))).mebibytes)
