"""The names of position schemes, with and without arguments."""

from __future__ import annotations

import re

import pytest
import torch

from biased_flash_attn import biases
from biased_flash_attn.nn import BASELINES, CausalLM, positions
from biased_flash_attn.nn.positions import split_names


def curve(scheme: str, num_heads: int = 3) -> torch.Tensor:
    """The bias of a scheme at some distances."""
    made = positions(scheme).bias(num_heads, 8 * num_heads)
    return made.curve(torch.arange(50, dtype=torch.float64))


@pytest.mark.parametrize(
    ("scheme", "bias"),
    [
        ("alibi(shift=6)", biases.ALiBi(3, shift=6)),
        ("alibi(exponent = 8)", biases.ALiBi(3, exponent=8)),
        ("alibi(shift=-3.5, slopes='geometric')", biases.ALiBi(3, shift=-3.5, slopes="geometric")),
        ("alibi(slopes=[1, 2, 0.5],)", biases.ALiBi(3, slopes=[1, 2, 0.5])),
        ("sandwich(first_frequency=0)", biases.Sandwich(3, first_frequency=0)),
        ("type1()", biases.Type1(3)),
    ],
)
def test_arguments_are_those_of_the_class(scheme, bias):
    distances = torch.arange(50, dtype=torch.float64)
    torch.testing.assert_close(curve(scheme), bias.curve(distances), rtol=0, atol=0)


def test_windows_have_a_width():
    assert positions("window(160)").window == 160
    assert positions("window( 1 )").window == 1


def test_options_of_biases_of_content_and_of_ones_own_are_passed_on():
    cable = positions("cable(activation='softplus', weighted=False)").bias(2, 16)
    assert (cable.activation, cable.w_s) == ("softplus", None)
    own = positions("biased_flash_attn.biases:T5(num_buckets=8)").bias(2, 16)
    assert own.num_buckets == 8
    with pytest.raises(ValueError, match=r"biases:T5 takes the keyword arguments num_buckets, max"):
        positions("biased_flash_attn.biases:T5(buckets=8)")


def test_lists_are_split_between_names():
    names = ["alibi(shift=6, slopes='geometric')", "window(16)", "alibi(slopes=[1, 2])", "none"]
    assert split_names(", ".join(names)) == names
    assert split_names("alibi") == ["alibi"]


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("window", "a window is like window(64)"),
        ("window(0)", "a window is like window(64)"),
        ("window(True)", "a window is like window(64)"),
        ("window(2.0)", "a window is like window(64)"),
        ("window(width=2)", "a window is like window(64)"),
        ("window(2, 3)", "a window is like window(64)"),
        ("alibi(6)", "with 6; alibi takes the keyword arguments slopes, shift, exponent, train"),
        ("alibi(shft=6)", "with shft; alibi takes the keyword arguments slopes, shift, exponent"),
        ("alibi(num_heads=6)", "with num_heads; alibi takes the keyword arguments slopes"),
        ("kerple_log(r1=1)", "with r1; kerple_log takes no arguments"),
        ("rotary(base=9)", "with base; rotary takes no arguments"),
        (
            "rope(base=9)",
            "it may be none, sinusoidal, learned, rotary, window(WIDTH), module:Class",
        ),
        (
            "disentangled(bucket=9)",
            "with bucket; disentangled takes the keyword arguments head",
        ),
        ("alibi(shift=", "it may be none"),
    ],
)
def test_errors_name_what_is_allowed(scheme, message):
    with pytest.raises(ValueError, match=f"^{re.escape(f'positions is {scheme!r}')}.*") as caught:
        positions(scheme)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "arguments",
    [
        "shift=__import__('os').getpid()",
        "shift=print(1)",
        "shift=shift",
        "shift=[x for x in (1, 2)]",
        "**{'shift': 1}",
        "*[1]",
        "shift=1, shift=2",
        "shift=1)(shift=2",
        "shift=1))",
        "shift=",
        "shift=" + "(" * 500 + ")" * 500,
    ],
)
def test_arguments_are_literals(arguments, capsys):
    with pytest.raises(
        ValueError, match=r"its arguments must be like shift=6, with literal values"
    ):
        positions(f"alibi({arguments})")
    assert not capsys.readouterr().out


def test_values_are_checked_by_the_class():
    with pytest.raises(TypeError, match=r"^shift must be a number, not 'far'"):
        CausalLM(9, 24, 1, 4, "alibi(shift='far')")


def test_every_name_takes_an_empty_list_of_arguments():
    for name in (*biases.NAMED, *BASELINES):
        first, second = positions(name), positions(f"{name}()")
        assert (first.embedding, first.rotary) == (second.embedding, second.rotary)
        assert (first.bias is None) == (second.bias is None)
