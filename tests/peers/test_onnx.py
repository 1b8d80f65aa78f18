"""ONNX, onnx/backend/test/case/node/attention.py: Attention of operator sets 23 to 25."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from biased_flash_attn import biased_flash_attn, biased_flash_attn_varlen, biases
from biased_flash_attn.compat import (
    flash_attn_func,
    flash_attn_with_kvcache,
    scaled_dot_product_attention,
)

from .oracle import assert_within, attention

PEER = ("ONNX", "onnx/backend/test/case/node/attention.py")
CAPPED = "capped logits"
STORED = "the logits or their softmax as a result"


@dataclass(frozen=True)
class Case:
    name: str
    batch: int = 2
    heads: tuple[int, int] = (3, 3)
    lengths: tuple[int, int] = (4, 6)  # queries and new keys
    dims: tuple[int, int] = (8, 8)
    past: int = 0  # keys before the new ones
    nonpad: tuple[int, ...] = ()  # the number of keys of each sequence; the others are padding
    mask: tuple[int, ...] = ()  # its shape
    bool_mask: bool = False
    masked_rows: bool = False  # whether the mask hides all keys from the first query
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    refused: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def n_key(self) -> int:
        return self.past + self.lengths[1]

    @property
    def offset(self) -> Tensor:
        """The position of the first query of each sequence, (batch or 1, 1, 1, 1)."""
        n = (
            torch.tensor(self.nonpad) - self.lengths[0]
            if self.nonpad
            else torch.tensor([self.past])
        )
        return n.view(-1, 1, 1, 1)


HALF, BFLOAT = torch.float16, torch.bfloat16
MASK, ALL_PAIRS, PER_BATCH = {"mask": (4, 6)}, {"mask": (2, 3, 4, 6)}, {"mask": (2, 1, 4, 6)}
PAST = {"past": 12, "mask": (4, 18)}
VALUES, GROUPS = {"dims": (8, 10)}, {"heads": (9, 3)}
SMALL = {"batch": 1, "heads": (2, 2), "lengths": (2, 2), "mask": (2, 2), "bool_mask": True}
WINDOW = {"causal": True, "window": (2, -1)}
PADDED = {"mask": (2, 3, 4, 4), "nonpad": (3, 4)}
CACHED = WINDOW | {"lengths": (4, 8), "nonpad": (6, 7)}
FILLED = {"causal": True, "heads": (2, 2)}
DECODED = {"causal": True, "heads": (4, 2), "lengths": (1, 8), "nonpad": (8, 5)}


def of_both_ranks(rank: str) -> Iterator[Case]:
    """The cases of inputs with heads inside of each token (3d) and of inputs with heads (4d)."""
    sizes = {"": {}, "_diff_heads_sizes": VALUES, "_gqa": GROUPS}
    settings = {
        "": {},
        "_attn_mask": MASK,
        "_causal": {"causal": True},
        "_scaled": {"scale": 0.01},
        "_softcap": {"refused": CAPPED},
    }
    for (size, given), (setting, more) in itertools.product(sizes.items(), settings.items()):
        yield Case(f"{rank}{size}{setting}", **given, **more)
    for size, given in {"": {}, "_diff_heads": VALUES, "_gqa": GROUPS}.items():
        yield Case(f"{rank}{size}_with_past_and_present", **PAST, **given)
    for kind in ("", "_bias"):
        yield Case(f"{rank}_with_past_and_present_qk_matmul{kind}", refused=STORED)


CASES = [
    *of_both_ranks("3d"),
    *of_both_ranks("4d"),
    Case("3d_with_past_and_present_qk_matmul_softcap", refused=STORED),
    Case("3d_with_past_and_present_qk_matmul_softmax", refused=STORED),
    Case("3d_causal_bf16", causal=True, dtype=BFLOAT),
    Case("3d_transpose_verification", batch=1, lengths=(2, 2), dims=(4, 4)),
    Case("3d_local_window", heads=(4, 1), dims=(8, 6), **WINDOW),
    Case("4d_attn_mask_3d", **PER_BATCH),
    Case("4d_attn_mask_3d_causal", causal=True, **PER_BATCH),
    Case("4d_attn_mask_4d", **ALL_PAIRS),
    Case("4d_attn_mask_4d_causal", causal=True, **ALL_PAIRS),
    Case("4d_attn_mask_bool", bool_mask=True, **MASK),
    Case("4d_attn_mask_bool_4d", bool_mask=True, **ALL_PAIRS),
    Case("4d_attn_mask_causal_bf16", causal=True, dtype=BFLOAT, **PER_BATCH),
    Case("4d_causal_bf16", causal=True, dtype=BFLOAT),
    Case("4d_causal_fp16", causal=True, dtype=HALF),
    Case("4d_fp16", dtype=HALF),
    Case("4d_gqa_with_past_and_present_fp16", dtype=HALF, **GROUPS, **PAST),
    Case("4d_causal_with_past_and_present", lengths=(4, 4), past=3, causal=True),
    Case(
        "4d_causal_nonpad_attn_mask_composition",
        lengths=(3, 6),
        nonpad=(4, 5),
        mask=(2, 1, 3, 6),
        bool_mask=True,
        **FILLED,
    ),
    Case("4d_causal_nonpad_batch_prefill", batch=3, lengths=(2, 6), nonpad=(4, 5, 6), **FILLED),
    Case("4d_causal_nonpad_continued_prefill", batch=1, lengths=(2, 4), nonpad=(4,), **FILLED),
    Case(
        "4d_causal_nonpad_negative_offset_structural_empty",
        batch=1,
        lengths=(4, 4),
        nonpad=(2,),
        **FILLED,
    ),
    Case("4d_gqa_causal_nonpad_decode", **DECODED),
    Case("4d_gqa_causal_nonpad_decode_fp16", dtype=HALF, **DECODED),
    Case("4d_diff_heads_mask4d_padded_kv", **VALUES, **PADDED),
    Case("4d_padded_kv_bf16", dtype=BFLOAT, **PADDED),
    Case("4d_causal_padded_kv_bf16", causal=True, dtype=BFLOAT, **PADDED),
    Case("4d_diff_heads_with_past_and_present_mask3d", past=12, mask=(2, 1, 4, 18), **VALUES),
    Case("4d_diff_heads_with_past_and_present_mask4d", past=12, mask=(2, 3, 4, 18), **VALUES),
    Case("4d_softcap_neginf_mask", refused=CAPPED),
    Case("4d_softcap_neginf_mask_poison", refused=CAPPED),
    Case("4d_with_past_and_present_qk_matmul_bias_3d_mask", refused=STORED),
    Case("4d_with_past_and_present_qk_matmul_bias_3d_mask_causal", refused=STORED),
    Case("4d_with_past_and_present_qk_matmul_bias_4d_mask", refused=STORED),
    Case("4d_with_past_and_present_qk_matmul_bias_4d_mask_causal", refused=STORED),
    Case("4d_with_qk_matmul", refused=STORED),
    Case("4d_with_qk_matmul_bias", refused=STORED),
    Case("4d_with_qk_matmul_softcap", refused=STORED),
    Case("4d_with_qk_matmul_softmax", refused=STORED),
    Case("23_boolmask_fullymasked_row_nan_robustness", masked_rows=True, **SMALL),
    Case("23_fullymasked_qk_matmul_output_mode3_zero", refused=STORED),
    Case("24_fullymasked_qk_matmul_output_mode3_zero", refused=STORED),
    Case("24_qk_matmul_output_mode3_softmax_precision", refused=STORED),
    Case("causal_boolmask_nan_robustness", causal=True, **SMALL),
    Case(
        "bidirectional_window",
        batch=1,
        heads=(1, 1),
        lengths=(5, 5),
        dims=(1, 1),
        window=(1, 2),
    ),
    Case("local_window", **WINDOW),
    Case("local_window_default"),
    Case("local_window_ext_cache_float16_mask", dtype=HALF, mask=(1, 8), **CACHED),
    Case("local_window_ext_cache_rank2_mask", mask=(1, 8), **CACHED),
    Case("local_window_ext_cache_rank3_head_mask", mask=(3, 4, 8), **CACHED),
    Case("local_window_ext_cache_rank4_batch_mask", mask=(2, 1, 4, 8), **CACHED),
    Case("local_window_gqa_rank4_mask", refused=STORED),
    Case("local_window_rank1_boolean_mask", mask=(6,), bool_mask=True, **WINDOW),
    Case("local_window_with_past", lengths=(4, 2), past=8, **WINDOW),
]


def added(case: Case, mask: Tensor) -> Tensor:
    """What the operator adds to the logits: query i has position offset + i, a mask may lack the
    last keys, and keys from `nonpad` on are padding."""
    position = torch.arange(case.lengths[0])[:, None] + case.offset
    key = torch.arange(case.n_key)
    visible = key <= position if case.causal else key >= 0
    left, right = case.window
    if left >= 0:
        visible = visible & (position - key <= left)
    if right >= 0:
        visible = visible & (key - position <= right)
    if case.nonpad:
        visible = visible & (key < torch.tensor(case.nonpad).view(-1, 1, 1, 1))
    if case.mask:
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        missing = case.n_key - mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, missing), value=-torch.inf)
    return torch.where(visible, mask, -torch.inf)


Qkv = tuple[Tensor, Tensor, Tensor]


def by_sdpa(case: Case, qkv: Qkv, mask: Tensor) -> Tensor:
    """Causal queries begin at the first key, as in the operator without past keys."""
    return scaled_dot_product_attention(
        *qkv,
        mask if case.mask else None,
        is_causal=case.causal,
        scale=case.scale,
        enable_gqa=True,
    )


def by_the_main_call(case: Case, qkv: Qkv, mask: Tensor) -> Tensor:
    """The last query is aligned with the last key, once keys after it are removed."""
    end = case.past + case.lengths[0] if case.causal else case.n_key
    q, k, v = qkv
    return biased_flash_attn(
        q,
        k[:, :, :end],
        v[:, :, :end],
        biases.DenseBias(mask.expand(1, -1)[..., :end] if mask.dim() == 1 else mask[..., :end])
        if case.mask
        else None,
        causal=case.causal,
        window=case.window[0] + 1 if case.window[0] >= 0 else None,
        scale=case.scale,
    )


def with_added_pairs(case: Case, qkv: Qkv, mask: Tensor) -> Tensor:
    """Everything that is added to the logits, as a bias."""
    return biased_flash_attn(*qkv, biases.DenseBias(added(case, mask)), causal=False)


def by_cache(case: Case, qkv: Qkv, mask: Tensor) -> Tensor:
    lengths = torch.tensor(case.nonpad, dtype=torch.int32)
    q, k, v = (x.transpose(1, 2) for x in qkv)
    return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True).transpose(1, 2)


def by_flash_attn(case: Case, qkv: Qkv, mask: Tensor) -> Tensor:
    """Windows on both sides, relative to the alignment of the last query with the last key."""
    left, right = (case.window[0], 0) if case.causal else case.window
    later = case.past + case.lengths[0] - case.n_key
    qkv = [x.transpose(1, 2) for x in qkv]
    return flash_attn_func(*qkv, window_size=(left - later, right + later)).transpose(1, 2)


def calls(case: Case) -> list[Callable]:
    """Every function of ours that has what the case needs."""
    if case.nonpad:
        return [with_added_pairs] if case.mask else [by_cache, with_added_pairs]
    if case.window[1] >= 0 or (case.causal and case.past + case.lengths[0] > case.n_key):
        return [by_flash_attn, with_added_pairs]
    if case.window[0] >= 0 or (case.causal and case.past):
        return [by_the_main_call]
    return [by_sdpa, by_the_main_call]


SERVED = [
    pytest.param(case, call, id=f"{case}-{call.__name__}")
    for case in CASES
    if not case.refused
    for call in calls(case)
]


@pytest.mark.parametrize(("case", "call"), SERVED)
def test_attention(case, call):
    (heads, kv_heads), n_query = case.heads, case.lengths[0]
    shapes = [(heads, n_query, case.dims[0]), *((kv_heads, case.n_key, d) for d in case.dims)]
    tensors = [torch.randn(case.batch, *shape) for shape in shapes]
    if case.name.startswith("3d"):  # heads lie inside of the sequence
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    mask = torch.randn(case.mask)
    if case.bool_mask:
        mask = mask > 0
        mask[..., 0] = True
        if case.masked_rows:
            mask[..., 0, :] = False
    scale = case.dims[0] ** -0.5 if case.scale is None else case.scale
    float_mask = [] if case.bool_mask or not case.mask else [mask]
    inputs = [x.to(case.dtype) for x in (*tensors, *float_mask)]

    def naive(q, k, v, mask=mask):
        return attention(q, k, v, added(case, mask), scale)

    def ours(q, k, v, mask=mask):
        return call(case, (q, k, v), mask)

    # Gradients of queries that see one key cancel.
    factor, gradients = 2 * (case.dtype != torch.float32), call is not by_cache
    assert_within(ours, naive, inputs, factor=factor, atol=1e-6, rtol=1e-3, gradients=gradients)


Q = torch.randn(2, 3, 4, 8)


@pytest.mark.parametrize("call", [biased_flash_attn, partial(biased_flash_attn_varlen, Q, Q)])
def test_results_of_pairs_are_refused(call):
    with pytest.raises(TypeError, match=r"qk_matmul_output_mode.*return_lse=True returns"):
        call(Q, Q, Q, qk_matmul_output_mode=3)


def test_capped_logits_are_refused():
    with pytest.raises(TypeError, match=r"softcap.*a bias is added to them"):
        biased_flash_attn(Q, Q, Q, softcap=3.0)
    with pytest.raises(ValueError, match=r"softcap is 3\.0; it must be 0"):
        flash_attn_func(Q, Q, Q, softcap=3.0)
