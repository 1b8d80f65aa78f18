"""flash_attn_func and flash_attn_varlen_func follow the documentation of flash-attn."""

from __future__ import annotations

import inspect
import itertools
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from biased_flash_attn import compat
from biased_flash_attn.compat import flash_attn_func, flash_attn_varlen_func
from tests.compat.flash_attn_cases import (
    FlashCase,
    FlashProblem,
    Mask,
    check_flash,
    check_results,
    drawn_flash,
)
from tests.support.cases import pairwise

LENGTHS = [(1, 1), (17, 17), (63, 130), (130, 63), (1, 130), (130, 1), (2, 5), (5, 2)]
WINDOWS = [(-1, -1), (0, 0), (3, -1), (-1, 2), (7, 5), (40, 0), (0, 9), (1000, 1), (1, 1000)]

COMBINATIONS = pairwise(
    lengths=LENGTHS,
    window_size=WINDOWS,
    causal=[False, True],
    alibi=[None, "heads", "batch"],
    heads=[(1, 1), (4, 2), (3, 1)],
    dims=[(16, 16), (8, 24), (17, 5)],
    dtype=[torch.float32, torch.bfloat16],
    layout=["contiguous", "heads_inside", "sliced"],
)


@pytest.mark.parametrize("case", [FlashCase(**row) for row in COMBINATIONS], ids=str)
def test_every_pair_of_settings(case):
    check_flash(drawn_flash(case))


@given(
    lengths=st.tuples(st.integers(0, 90), st.integers(0, 90)),
    window_size=st.tuples(st.integers(-1, 100), st.integers(-1, 100)),
    causal=st.booleans(),
    alibi=st.sampled_from([None, "heads", "batch"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_any_lengths_and_windows(lengths, window_size, causal, alibi, seed):
    torch.manual_seed(seed)
    case = FlashCase(
        lengths=lengths,
        window_size=window_size,
        causal=causal,
        alibi=alibi,
        dims=(8, 8),
        dtype=torch.float64,
    )
    check_flash(drawn_flash(case))


@pytest.mark.parametrize(
    ("n_query", "n_key", "printed"),
    [
        (2, 5, ["11110", "11111"]),
        (5, 2, ["00", "00", "00", "10", "11"]),
    ],
)
def test_masks_of_the_documentation(n_query, n_key, printed):
    mask = torch.tensor([[float(x) for x in row] for row in printed])
    q, k = torch.zeros(1, n_query, 1, 8), torch.randn(1, n_key, 1, 8)
    v = torch.eye(n_key)[None, :, None]
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    torch.testing.assert_close(out[0, :, 0], mask / mask.sum(1, keepdim=True).clamp(min=1))
    torch.testing.assert_close(lse[0, 0].exp(), mask.sum(1))


@pytest.mark.parametrize("n_key", [1, 2, 4])
@pytest.mark.parametrize("n_query", [1, 2, 4])
def test_every_window_of_short_sequences_is_exact(n_query, n_key):
    q, k = torch.zeros(1, n_query, 1, 8), torch.randn(1, n_key, 1, 8)
    v = torch.eye(n_key)[None, :, None]
    sides = range(-1, 5)
    for causal, *window_size in itertools.product([False, True], sides, sides):
        out = flash_attn_func(q, k, v, causal=causal, window_size=window_size)
        visible = Mask(n_query, n_key, causal, tuple(window_size)).visible()
        assert torch.equal(out[0, :, 0] > 0, visible), (causal, window_size)


SEQUENCES = [(5, 5), (0, 3), (17, 63), (63, 17), (4, 0), (0, 0), (1, 130), (130, 130)]


def packed(problems: list[FlashProblem]) -> list[dict[str, Tensor]]:
    """The results of flash_attn_varlen_func for sequences that are one problem each."""

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(problem, name)[0].transpose(0, 1) for problem in problems])

    lengths = torch.tensor([problem.case.lengths for problem in problems])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (0, 0, 1, 0)).int().unbind(1)
    options = problems[0].options()
    if problems[0].slopes is not None:
        options["alibi_slopes"] = torch.cat([problem.slopes for problem in problems])
    longest = lengths.amax(0).tolist()
    out, lse, probabilities = flash_attn_varlen_func(
        *map(joined, "qkv"), *offsets, *longest, **options, return_attn_probs=True
    )
    assert out.is_contiguous()
    assert probabilities is None
    leaves = [leaf for problem in problems for leaf in problem.leaves().values()]
    grad_lse = torch.cat([problem.grad_lse[0] for problem in problems], 1)
    gradients = iter(torch.autograd.grad((out, lse), leaves, (joined("grad_o"), grad_lse)))
    counts = lengths[:, 0].tolist()
    return [
        {"o": o.transpose(0, 1)[None].detach(), "lse": lse[None].detach()}
        | {f"gradient of {name}": next(gradients) for name in problem.leaves()}
        for problem, o, lse in zip(problems, out.split(counts), lse.split(counts, 1), strict=True)
    ]


@pytest.mark.parametrize("window_size", [(-1, -1), (9, 0), (6, 4), (-1, 30), (70, -1)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("alibi", [None, "batch"])
def test_packed_sequences(alibi, causal, window_size):
    dtype = random.choice([torch.float32, torch.bfloat16])
    case = FlashCase(
        batch=1,
        heads=(4, 2),
        dims=(16, 8),
        layout="heads_inside",
        dtype=dtype,
        causal=causal,
        window_size=window_size,
        alibi=alibi,
    )
    problems = [drawn_flash(replace(case, lengths=lengths)) for lengths in SEQUENCES]
    for problem, ours in zip(problems, packed(problems), strict=True):
        check_results(problem, ours)


def test_slopes_per_head_apply_to_every_sequence():
    lengths = torch.tensor([0, 9, 30], dtype=torch.int32)
    q, k, v = torch.randn(3, 30, 4, 8)
    gradients = []
    slopes = torch.rand(4)
    for shaped in (slopes, slopes.expand(2, 4)):
        leaf = shaped.clone().requires_grad_()
        out = flash_attn_varlen_func(q, k, v, lengths, lengths, 21, 21, alibi_slopes=leaf)
        gradients.append(torch.autograd.grad(out.square().sum(), leaf)[0])
    torch.testing.assert_close(gradients[0], gradients[1].sum(0))


def test_projections_are_read_in_place():
    """q, k and v are slices of one projection, as models pass them to flash-attn."""
    x = torch.randn(2, 33, 3 * 4 * 16, requires_grad=True)
    q, k, v = x.view(2, 33, 3, 4, 16).unbind(2)
    out = flash_attn_func(q, k, v, causal=True)
    apart = flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(out, apart)
    assert out.view(2, 33, 64).shape == (2, 33, 64)


def test_channels_may_be_strided():
    q, k, v = torch.randn(3, 2, 16, 9, 4).mT.transpose(1, 2)
    assert q.stride(-1) != 1
    out = flash_attn_func(q, k, v)
    assert torch.equal(out, flash_attn_func(q.contiguous(), k.contiguous(), v.contiguous()))


def test_autocast_unifies_dtypes():
    """Norms return float32, projections bfloat16."""
    q, k, v = torch.randn(3, 2, 20, 4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn_func(q, k, v.bfloat16(), causal=True)
    assert torch.equal(out, flash_attn_func(*(x.bfloat16() for x in (q, k, v)), causal=True))


@pytest.mark.parametrize("window_size", [(-1, -1), (20, 7)], ids=str)
def test_compiles_as_one_graph(window_size):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q, k, v, slopes):
        return flash_attn_func(q, k, v, window_size=window_size, alibi_slopes=slopes)

    q, k, v = (torch.randn(2, 40, 4, 8, requires_grad=True) for _ in range(3))
    slopes = torch.rand(4, requires_grad=True)
    results = []
    for function in (attend, attend.__wrapped__):
        out = function(q, k, v, slopes)
        results.append([out, *torch.autograd.grad(out.square().sum(), (q, k, v, slopes))])
    for ours, eager in zip(*results, strict=True):
        assert torch.equal(ours, eager)


_OPTIONS = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,"
    " alibi_slopes=None, deterministic=False, return_attn_probs=False"
)
_OFFSETS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {_OPTIONS}",
    "flash_attn_kvpacked_func": f"q, kv, {_OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv, {_OPTIONS}",
    "flash_attn_varlen_func": f"q, k, v, {_OFFSETS}, {_OPTIONS}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {_OFFSETS}, {_OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {_OPTIONS}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None,"
    " rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None,"
    " block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,"
    " rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
    "scaled_dot_product_attention": "query, key, value, attn_mask=None, dropout_p=0.0,"
    " is_causal=False, scale=None, enable_gqa=False, *, bias=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_equal_those_of_the_other_packages(name):
    signature = inspect.signature(getattr(compat, name))
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[name]})"
    assert sorted(compat.__all__) == sorted(SIGNATURES)
