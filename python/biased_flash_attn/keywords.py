"""Hints for keywords of other attention functions, which those of this package do not have."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

Call = TypeVar("Call", bound=Callable)

HINTS = {
    "is_causal": "the argument is causal",
    "attn_mask": (
        "pass what is added to the logits as bias=biases.DenseBias(attn_mask), or call"
        " compat.scaled_dot_product_attention"
    ),
    "dropout_p": "there is no dropout",
    "softmax_scale": "the argument is scale",
    "alibi_slopes": "pass bias=biases.ALiBi(slopes=alibi_slopes)",
    "window_size": "the argument is window, which counts the query's own position",
    "softcap": "logits are not capped; a bias is added to them",
    "score_mod": (
        "pass what it adds to the logits as bias: biases.DistanceBias.from_function(f, num_heads)"
        " for a function of the distance, biases.DenseBias(tensor) for any other; logits are not"
        " otherwise modified, except by scale"
    ),
    "block_table": (
        "pages belong to a KVCache, for biased_flash_attn_with_kvcache; without one,"
        " compat.flash_attn_with_kvcache reads them"
    ),
    "qk_matmul_output_mode": (
        "logits and their softmax are not stored; return_lse=True returns the logarithm of its"
        " denominators"
    ),
    "enable_gqa": "k and v may have fewer heads without it",
}


def explains_keywords(**hints: str) -> Callable[[Call], Call]:
    """A decorator of a call, whose error for another function's keyword says what to pass instead.

    hints: those of the call, in addition to HINTS. Any other unknown keyword raises Python's own
    TypeError.
    """
    hints = HINTS | hints

    def decorate(call: Call) -> Call:
        foreign = hints.keys() - inspect.signature(call).parameters.keys()

        @functools.wraps(call)
        def explained(*args, **kwargs):
            if not foreign.isdisjoint(kwargs):
                name = next(name for name in kwargs if name in foreign)
                raise TypeError(f"{call.__name__}() has no argument {name!r}: {hints[name]}")
            return call(*args, **kwargs)

        return explained

    return decorate
