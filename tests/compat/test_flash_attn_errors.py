"""Invalid arguments of the functions of flash-attn raise an error before any work."""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn.compat import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

Q, K, V = torch.randn(2, 6, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 5)
OF_ALL = {
    "softcap": (ValueError, "softcap is 30.0; it must be 0", {"softcap": 30.0}),
    "scale is infinite": (ValueError, "softmax_scale is inf", {"softmax_scale": float("inf")}),
    "scale is a tensor": (TypeError, "softmax_scale is tensor", {"softmax_scale": Q.sum()}),
    "causal is not a bool": (TypeError, "causal is 1", {"causal": 1}),
    "window is a number": (TypeError, "window_size is 5", {"window_size": 5}),
    "window has a None": (
        TypeError,
        r"window_size is \(5, None\)",
        {"window_size": (5, None)},
    ),
    "window is negative": (ValueError, r"window_size is \(-2, 0\)", {"window_size": (-2, 0)}),
    "slopes are a list": (TypeError, "alibi_slopes is a list", {"alibi_slopes": [0.1] * 4}),
    "slopes are bfloat16": (
        TypeError,
        "alibi_slopes is torch.bfloat16; it must be torch.float32",
        {"alibi_slopes": torch.rand(4).bfloat16()},
    ),
    "slopes have other heads": (
        ValueError,
        r"alibi_slopes has shape \(2,\); it must be .* \(4,\) or \(2, 4\)",
        {"alibi_slopes": torch.rand(2)},
    ),
    "slopes have another batch": (
        ValueError,
        r"alibi_slopes has shape \(1, 4\)",
        {"alibi_slopes": torch.rand(1, 4)},
    ),
    "slopes are on another device": (
        ValueError,
        "alibi_slopes is on meta",
        {"alibi_slopes": torch.rand(4, device="meta")},
    ),
    "slopes are NaN": (
        ValueError,
        "slopes contain NaN",
        {"alibi_slopes": Q.new_full((4,), float("nan"))},
    ),
    "q is not a tensor": (TypeError, "q is a NoneType", {"q": None}),
}

OF_FUNC = {
    "q holds integers": (TypeError, "q is torch.int64", {"q": Q.long()}),
    "dropout": (ValueError, "dropout_p is 0.1; it must be 0", {"dropout_p": 0.1}),
    "q has three dimensions": (
        ValueError,
        r"q has shape \(6, 4, 8\); it must be \(batch, sequence, heads, head_dim\)",
        {"q": Q[0]},
    ),
    "k has another batch": (ValueError, "k has batch 1", {"k": K[:1], "v": V[:1]}),
    "k has another dtype": (TypeError, "k is torch.float64 and q is", {"k": K.double()}),
    "k has another head_dim": (ValueError, "k has head_dim 7", {"k": K[..., :7]}),
    "v has another length": (ValueError, r"v has shape \(2, 8, 2, 5\)", {"v": V[:, 1:]}),
    "heads do not divide": (
        ValueError,
        "k has 3 heads; their number must divide that of q, 4",
        {"k": torch.randn(2, 9, 3, 8), "v": torch.randn(2, 9, 3, 5)},
    ),
}

OFFSETS = {"cu_seqlens_q": torch.tensor([0, 4, 6]), "cu_seqlens_k": torch.tensor([0, 2, 9])}
PACKED = {
    "q": Q[0],
    "k": K[0],
    "v": V[0],
    **{name: x.int() for name, x in OFFSETS.items()},
    "max_seqlen_q": 4,
    "max_seqlen_k": 7,
}
OF_PACKED = {
    "dropout": (ValueError, "dropout_p is 0.1; it must be 0", {"dropout_p": 0.1}),
    "pages": (
        ValueError,
        "block_table is given; it must be None: flash_attn_with_kvcache",
        {"block_table": torch.zeros(2, 1, dtype=torch.int32)},
    ),
    "q has four dimensions": (ValueError, "q has shape .* it must be .total", {"q": Q}),
    "offsets are int64": (TypeError, "cu_seqlens_q is torch.int64", OFFSETS),
    "offsets end early": (
        ValueError,
        "cu_seqlens_k ends with 7",
        {"cu_seqlens_k": torch.tensor([0, 2, 7], dtype=torch.int32)},
    ),
    "the maximum is too small": (ValueError, "max_seqlen_q is 3", {"max_seqlen_q": 3}),
    "the maximum is missing": (
        TypeError,
        "max_seqlen_k is None; it must be an int",
        {"max_seqlen_k": None},
    ),
    "the maximum is a string": (
        TypeError,
        "max_seqlen_q is '4'; it must be an int$",
        {"max_seqlen_q": "4"},
    ),
    "the maximum is negative": (
        ValueError,
        "max_seqlen_q is -1; it must be a nonnegative int",
        {"max_seqlen_q": -1},
    ),
}

INTS = torch.tensor([3, 5], dtype=torch.int32)
TABLE = torch.tensor([[0, 2], [1, 3]], dtype=torch.int32)
PAGES = {"k_cache": torch.randn(4, 16, 2, 8), "v_cache": torch.randn(4, 16, 2, 5)}
ANGLES = torch.rand(20, 3)
NEW = {"k": K[:, :4], "v": V[:, :4]}
with torch.inference_mode():
    INFERENCE = V.clone()
OF_CACHE = {
    "only k": (ValueError, "k is given and v is None", {"v": None}),
    "only v": (ValueError, "v is given and k is None", {"k": None}),
    "k has other heads": (ValueError, "k has shape", {"k": torch.randn(2, 4, 4, 8)}),
    "v has other channels": (ValueError, "v has shape", {"v": torch.randn(2, 4, 2, 8)}),
    "cache has another dtype": (TypeError, "v_cache is torch.float64", {"v_cache": V.double()}),
    "cache has three dimensions": (ValueError, "k_cache has shape", {"k_cache": K[0]}),
    "cache has strided channels": (
        ValueError,
        "k_cache has stride",
        {"k_cache": torch.randn(2, 9, 8, 2).mT},
    ),
    "caches differ": (ValueError, "v_cache has shape", {"v_cache": V[:, 1:]}),
    "cache has another batch": (
        ValueError,
        "k_cache has batch 1; without cache_batch_idx",
        {"k_cache": K[:1], "v_cache": V[:1]},
    ),
    "lengths are missing": (ValueError, "cache_seqlens is None; with k", {"cache_seqlens": None}),
    "lengths are int64": (
        TypeError,
        "cache_seqlens is torch.int64",
        {"cache_seqlens": INTS.long()},
    ),
    "lengths are a list": (
        TypeError,
        "cache_seqlens is a list; it must be None, an int or a torch.Tensor",
        {"cache_seqlens": [3, 5]},
    ),
    "lengths have another batch": (
        ValueError,
        "cache_seqlens has shape",
        {"cache_seqlens": INTS[:1]},
    ),
    "lengths are negative": (ValueError, "cache_seqlens has -3", {"cache_seqlens": -INTS + 2}),
    "cache is full": (
        ValueError,
        "cache_seqlens with the new tokens is 10; it may be at most the capacity of a sequence, 9",
        {"cache_seqlens": 6},
    ),
    "entry does not exist": (
        ValueError,
        "cache_batch_idx has the entry 3; it may be 0 to 1",
        {"cache_batch_idx": INTS},
    ),
    "padding beyond keys": (
        ValueError,
        r"cache_leftpad\[0\] is 4; it may be 0 to cache_seqlens\[0\], 3",
        {"cache_leftpad": INTS + 1},
    ),
    "pages with entries": (
        ValueError,
        "cache_batch_idx is given with block_table",
        {"block_table": TABLE, "cache_batch_idx": INTS, **PAGES},
    ),
    "page size is odd": (
        ValueError,
        "k_cache has pages of 65 keys",
        {
            "block_table": TABLE,
            "k_cache": torch.randn(4, 65, 2, 8),
            "v_cache": torch.randn(4, 65, 2, 5),
        },
    ),
    "pages are full": (
        ValueError,
        "is 34; it may be at most the capacity of a sequence, 32",
        {"block_table": TABLE, "cache_seqlens": 30, **PAGES},
    ),
    "page does not exist": (
        ValueError,
        "block_table has the entry 4; it may be 0 to 3",
        {"block_table": TABLE + 1, "cache_seqlens": 20, **PAGES},
    ),
    "table is int64": (
        TypeError,
        "block_table is torch.int64",
        {"block_table": TABLE.long(), **PAGES},
    ),
    "table has another batch": (
        ValueError,
        "block_table has shape",
        {"block_table": TABLE[:1], **PAGES},
    ),
    "rotary without sines": (TypeError, "rotary_sin is a NoneType", {"rotary_cos": ANGLES}),
    "rotary without cosines": (TypeError, "rotary_cos is a NoneType", {"rotary_sin": ANGLES}),
    "rotary without tokens": (
        ValueError,
        "rotary_cos is given and k is None",
        {"rotary_cos": ANGLES, "rotary_sin": ANGLES, "k": None, "v": None},
    ),
    "rotary beyond its table": (
        ValueError,
        "rotary_cos has 8 positions; the tokens need 9",
        {"rotary_cos": ANGLES[:8], "rotary_sin": ANGLES[:8]},
    ),
    "rotary of more channels": (
        ValueError,
        "rotary_cos has shape",
        {"rotary_cos": torch.rand(20, 5), "rotary_sin": torch.rand(20, 5)},
    ),
    "sines of another shape": (
        ValueError,
        "rotary_sin has shape",
        {"rotary_cos": ANGLES, "rotary_sin": ANGLES[1:]},
    ),
    "rotary in half": (
        TypeError,
        "rotary_cos is torch.float16",
        {"rotary_cos": ANGLES.half(), "rotary_sin": ANGLES.half()},
    ),
    "q requires gradients": (
        ValueError,
        "q requires gradients.*no_grad",
        {"q": Q.clone().requires_grad_()},
    ),
    "slopes are infinite": (
        ValueError,
        "alibi_slopes contain NaN or infinities",
        {"alibi_slopes": torch.tensor([1.0, 2.0, torch.inf, 1.0]), "window_size": (2, 1)},
    ),
    "values from inference mode": (
        ValueError,
        "v_cache was created in inference mode",
        {"v_cache": INFERENCE},
    ),
    "slopes require gradients": (
        ValueError,
        "alibi_slopes requires gradients",
        {"alibi_slopes": torch.rand(4, requires_grad=True)},
    ),
}


@pytest.mark.parametrize("wrong", [*OF_ALL, *OF_FUNC])
def test_flash_attn_func_refuses_invalid_arguments(wrong):
    error, message, arguments = (OF_ALL | OF_FUNC)[wrong]
    with pytest.raises(error, match=message):
        flash_attn_func(**({"q": Q, "k": K, "v": V} | arguments))


@pytest.mark.parametrize("wrong", [*OF_ALL, *OF_PACKED])
def test_flash_attn_varlen_func_refuses_invalid_arguments(wrong):
    error, message, arguments = (OF_ALL | OF_PACKED)[wrong]
    with pytest.raises(error, match=message):
        flash_attn_varlen_func(**(PACKED | arguments))


@pytest.mark.parametrize("wrong", [*OF_ALL, *OF_CACHE])
def test_flash_attn_with_kvcache_leaves_the_cache_unchanged(wrong):
    error, message, arguments = (OF_ALL | OF_CACHE)[wrong]
    call = {"q": Q, "k_cache": K.clone(), "v_cache": V.clone(), "cache_seqlens": INTS} | NEW
    call |= arguments
    before = call["k_cache"].clone(), call["v_cache"].clone()
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(**call)
    assert torch.equal(call["k_cache"], before[0])
    assert torch.equal(call["v_cache"], before[1])


def test_caches_on_meta_are_refused():
    q, cache = torch.empty(2, 1, 4, 16, device="meta"), torch.empty(2, 64, 4, 16, device="meta")
    with pytest.raises(ValueError, match=r"^q is on meta and has no values"):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3)
