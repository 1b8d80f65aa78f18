"""Prints the MiB by which a process grows in a call of a model.

It runs in a separate process, because memory freed earlier would hide what a call needs.

Usage: python -m bench.common.growth MODULE CLASS MODEL LENGTH OPTIONS

OPTIONS are keyword arguments of the class, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from functools import partial

import torch

from bench.common.measure import THREADS, printed_by
from biased_flash_attn.cli.cost import cost


def growth(kind: Callable, model: str, length: int, **options: bool) -> float:
    """The MiB that a call of kind(model, length, **options) needs."""
    named = kind.__module__, kind.__name__, model, str(length), json.dumps(options)
    return printed_by("bench.common.growth", *named)


if __name__ == "__main__":
    module, name, model, length, options = sys.argv[1:]
    torch.set_num_threads(THREADS)
    make = partial(getattr(importlib.import_module(module), name), model, **json.loads(options))
    make(64)()  # initializes libraries
    print(cost(make(int(length))).mebibytes)
