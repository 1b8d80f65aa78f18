"""Prints the MiB by which a process grows in a call of a model.

It runs in a separate process, because memory freed earlier would hide what a call needs.

Usage: python -m bench.models.memory attention|encoder MODEL LENGTH accelerated|own
"""

import sys

import torch

from bench.common.measure import THREADS, printed_by
from bench.models.subjects import Encoding, Training
from biased_flash_attn.cli.cost import cost

KINDS = {"attention": Training, "encoder": Encoding}


def needed(kind: str, model: str, length: int, side: str) -> float:
    return printed_by("bench.models.memory", kind, model, str(length), side)


if __name__ == "__main__":
    kind, model, length, side = sys.argv[1:]
    torch.set_num_threads(THREADS)
    accelerated = side == "accelerated"
    KINDS[kind](model, 64, accelerated=accelerated)()  # initializes libraries
    print(cost(KINDS[kind](model, int(length), accelerated=accelerated)).mebibytes)
