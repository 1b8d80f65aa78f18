"""Keywords of other attention functions are explained; the calls keep their signatures."""

from __future__ import annotations

import inspect

import pytest

from biased_flash_attn import (
    biased_flash_attn,
    biased_flash_attn_varlen,
    biased_flash_attn_with_kvcache,
)

CALLS = (biased_flash_attn, biased_flash_attn_varlen, biased_flash_attn_with_kvcache)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("attn_mask", r"bias=biases\.DenseBias\(attn_mask\).*scaled_dot_product_attention"),
        ("dropout_p", "there is no dropout"),
        ("softmax_scale", "the argument is scale"),
        ("alibi_slopes", r"bias=biases\.ALiBi\(slopes=alibi_slopes\)"),
        ("softcap", "logits are not capped; a bias is added"),
        (
            "score_mod",
            r"DistanceBias\.from_function\(f, num_heads\) .*DenseBias\(tensor\)",
        ),
        ("block_table", r"pages belong to a KVCache.* compat\.flash_attn_with_kvcache"),
        ("qk_matmul_output_mode", "return_lse=True returns the logarithm"),
        ("enable_gqa", "fewer heads"),
    ],
)
def test_keywords_of_other_functions_are_explained(call, name, hint):
    with pytest.raises(
        TypeError, match=rf"^{call.__name__}\(\) has no argument '{name}': .*{hint}"
    ):
        call(**{name: None})


@pytest.mark.parametrize(
    ("call", "is_causal", "window_size"),
    [
        (biased_flash_attn, "the argument is causal", "the argument is window"),
        (biased_flash_attn_varlen, "the argument is causal", "the argument is window"),
        (biased_flash_attn_with_kvcache, "to a cache is causal", "the window is that of the KVC"),
    ],
)
def test_keywords_of_masks_are_explained(call, is_causal, window_size):
    with pytest.raises(TypeError, match=is_causal):
        call(is_causal=True)
    with pytest.raises(TypeError, match=window_size):
        call(window_size=(-1, -1))


@pytest.mark.parametrize("call", CALLS)
def test_unknown_keywords_raise_the_error_of_python(call):
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'color'"):
        call(color=1)


@pytest.mark.parametrize("call", CALLS)
def test_signatures_list_every_argument(call):
    kinds = {parameter.kind for parameter in inspect.signature(call).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
