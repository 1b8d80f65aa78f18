"""A plugin of pytest that runs transformers' own tests with accelerated models.

    PYTHONPATH=tests/integrations/transformers pytest -p own_suite \
        <a checkout of transformers>/tests/models/t5/test_modeling_t5.py

Each supported model is accelerated as soon as it is constructed or loaded, and models that are
refused keep their own attention. With `--own-attention`, all do. Either way there is no dropout of
attention weights, which accelerated models refuse in training.
"""

from __future__ import annotations

import functools
import inspect
import sys

from torch import nn
from transformers import PreTrainedModel

from biased_flash_attn.integrations.transformers import accelerate
from biased_flash_attn.integrations.transformers.families import FUSED

_DROPOUTS = ("attention_dropout", "attn_dropout_p", "dropout")


def pytest_addoption(parser) -> None:
    parser.addoption("--own-attention", action="store_true", help="do not accelerate models")


def pytest_configure(config) -> None:
    finish = _without_dropout if config.getoption("--own-attention") else _accelerated
    outermost = _Outermost(finish)
    for module in {sys.modules[layer.__module__] for layer in FUSED}:
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if issubclass(kind, PreTrainedModel) and kind.__module__ == module.__name__:
                kind.__init__ = outermost(kind.__init__)
    load = outermost(PreTrainedModel.from_pretrained.__func__)
    PreTrainedModel.from_pretrained = classmethod(load)


class _Outermost:
    """Wraps functions that create models, to finish those that are not parts of others."""

    def __init__(self, finish):
        self.finish, self.depth = finish, 0

    def __call__(self, create):
        @functools.wraps(create)
        def created(first, *args, **kwargs):
            self.depth += 1
            try:
                result = create(first, *args, **kwargs)
            finally:
                self.depth -= 1
            if self.depth == 0:
                model = first if result is None else result
                self.finish(model[0] if isinstance(model, tuple) else model)
            return result

        return created


def _accelerated(model: PreTrainedModel) -> None:
    _without_dropout(model)
    try:
        accelerate(model)
    except NotImplementedError as error:
        print("not accelerated:", error)


def _without_dropout(model: PreTrainedModel) -> None:
    for layer in model.modules():
        if type(layer) not in FUSED:
            continue
        for name in _DROPOUTS:
            dropout = getattr(layer, name, None)
            if isinstance(dropout, nn.Dropout):
                dropout.p = 0.0
            elif dropout is not None:
                setattr(layer, name, 0.0)
