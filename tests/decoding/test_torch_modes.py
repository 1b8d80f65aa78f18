"""Decoding in PyTorch's modes, and its operator in PyTorch's machinery."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch

from biased_flash_attn import KVCache, biased_flash_attn_with_kvcache, biases, operators
from biased_flash_attn.arguments import DECODING
from tests.decoding.cases import bias_of, check_decoding, decoded, make_cache
from tests.support.biases import FORMS
from tests.support.cases import Case
from tests.support.problems import drawn

H, HKV, D = 4, 2, 16


def tokens(n: int):
    return torch.randn(1, H, n, D), *torch.randn(2, 1, HKV, n, D)


@pytest.mark.parametrize("bias", FORMS)
def test_opcheck(bias, monkeypatch):
    """With the arguments that a step calls it with."""
    problem = drawn(Case(bias, lengths=(150, 150), batch=2, heads=(4, 2), window=40))
    cache = make_cache(problem, "contiguous")
    decoded(problem, cache, (150,))
    calls = []
    decode = operators.decode

    def noted(problem):
        calls.append(DECODING.flat(problem.detached()))
        return decode(problem)

    monkeypatch.setattr(operators, "decode", noted)
    last = slice(148, 150)
    cache.truncate(148)
    with torch.no_grad():
        q, k, v = (x[:, :, last].detach() for x in (problem.q, problem.k, problem.v))
        biased_flash_attn_with_kvcache(q, cache, k, v, bias_of(problem, last), backend="cpu")
    (arguments,) = calls
    torch.library.opcheck(torch.ops.biased_flash_attn.decode.default, arguments)


@pytest.mark.parametrize("name", ["kerple", "relative"])
def test_caches_made_in_inference_mode_continue_outside(name):
    kerple, table = biases.KerpleLog(H), biases.TransformerXL(H, D).requires_grad_(False).table

    def step(n: int) -> None:
        q, k, v = tokens(n)
        of_keys = biases.RelativeBias(q, table, torch.randn(1, H, n, D), table)
        biased_flash_attn_with_kvcache(q, cache, k, v, kerple if name == "kerple" else of_keys)

    with torch.inference_mode():
        cache = KVCache(1, HKV, D)
        step(3)
    with torch.no_grad():
        step(70)
    with torch.inference_mode():
        step(70)
        cache.truncate(100)
    assert cache.lengths == [100]


def test_autocast():
    cache = KVCache(1, HKV, D, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for n in (5, 1):
            q, k, v = tokens(n)
            o, lse = biased_flash_attn_with_kvcache(q, cache, k, v, return_lse=True)
    assert o.dtype == torch.bfloat16
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_repeatable_bit_for_bit(threads):
    """However the parts of the keys were dealt out."""
    n = 5000
    cache, (q, k, v) = KVCache(1, HKV, D), tokens(n)
    torch.set_num_threads(threads)
    biased_flash_attn_with_kvcache(q[:, :, :0], cache, k, v)
    runs = [biased_flash_attn_with_kvcache(q[:, :, -2:], cache) for _ in range(20)]
    for run in runs:
        assert torch.equal(run, runs[0])


def test_gains_with_strides():
    problem = drawn(Case("cumulative-gain", lengths=(40, 40), heads=(4, 2)))
    cache = make_cache(problem, "contiguous")
    given = bias_of(problem, slice(0, 40))
    strided = biases.CumulativeBias(
        given.steps.mT.contiguous().mT, given.gain.mT.contiguous().mT, given.kernel
    )
    assert not strided.gain.is_contiguous()
    parts = []
    with torch.no_grad():
        for now in (slice(0, 25), slice(25, 40)):
            bias = biases.CumulativeBias(strided.steps[..., now], strided.gain[..., now])
            q, k, v = (x[:, :, now] for x in (problem.q, problem.k, problem.v))
            parts.append(biased_flash_attn_with_kvcache(q, cache, k, v, bias, return_lse=True))
    check_decoding(problem, *(torch.cat(x, 2) for x in zip(*parts, strict=True)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # where a pool grows
def test_steps_in_compiled_functions():
    bias = biases.ALiBi(H)
    cache, other = KVCache(1, HKV, D), KVCache(1, HKV, D)

    @torch.compile(backend="aot_eager")
    def step(q, k, v):
        return 2 * biased_flash_attn_with_kvcache(q, cache, k, v, bias)

    with torch.no_grad():
        for n in (5, 1, 70):
            q, k, v = tokens(n)
            expected = 2 * biased_flash_attn_with_kvcache(q, other, k, v, bias)
            torch.testing.assert_close(step(q, k, v), expected)
    assert cache.lengths == [76]


@contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (nullcontext, torch.float32),
        (lambda: default_dtype(torch.bfloat16), torch.bfloat16),
        (lambda: torch.autocast("cpu", torch.float16), torch.float16),
    ],
    ids=["plain", "default dtype", "autocast"],
)
def test_caches_have_the_dtype_of_attention_by_default(mode, dtype):
    with torch.no_grad(), mode():
        cache = KVCache(1, HKV, D)
        q, k, v = tokens(3)
        o = biased_flash_attn_with_kvcache(q, cache, k, v)
    assert cache.k.dtype == o.dtype == dtype
