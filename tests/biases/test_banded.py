"""Inkling's band of mixed profiles."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from transformers.models import inkling, inkling2

from biased_flash_attn.biases import BandedRelative
from tests.biases.relative_cases import (
    REFERENCE,
    assert_same_results,
    attended,
    drawn,
    named,
    randomized,
)

DIM, HEADS, HEAD_DIM = 12, 3, 4


def by_pairs(bias: BandedRelative, x: torch.Tensor) -> torch.Tensor:
    """The dense bias, one pair at a time."""
    n = x.shape[1]
    of_heads = (x @ bias.r_proj.weight.mT).unflatten(-1, (bias.num_heads, bias.rank))
    if bias.max_norm is not None:
        of_heads = of_heads * bias.clip_scale
        norms = of_heads.square().sum(-1, keepdim=True).sqrt()
        of_heads = torch.where(norms > bias.max_norm, of_heads * bias.max_norm / norms, of_heads)
    dense = []
    for i in range(n):
        tau = 1.0
        if bias.log_floor is not None and i + 1 > bias.log_floor:
            tau += bias.log_alpha * math.log((i + 1) / bias.log_floor)
        for j in range(n):
            inside = 0 <= i - j < bias.extent
            mixed = of_heads[:, i] @ bias.proj[:, i - j] if inside else 0 * of_heads[:, i].sum(-1)
            dense.append(tau * mixed)
    return torch.stack(dense, -1).unflatten(-1, (n, n))


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_there_may_be_no_queries(max_norm):
    bias = BandedRelative(DIM, HEADS, log_floor=3.0, max_norm=max_norm)
    x, q = torch.randn(2, 5, DIM), torch.randn(2, HEADS, HEAD_DIM, 5).mT[:, :, :0]
    k = torch.randn(2, HEADS, 5, HEAD_DIM)
    o = REFERENCE(bias.queries(q), k, k, bias(x, q))
    assert o.shape == (2, HEADS, 0, HEAD_DIM)
    gradients = torch.autograd.grad(o.sum(), [*bias.parameters()])
    assert all(not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {"extent": 4},
        {"extent": 1, "rank": 1},
        {"extent": 30, "log_floor": 3, "log_alpha": 0.7},
        {"extent": 5, "max_norm": 1.5},
    ],
    ids=str,
)
def test_results_equal_the_pairwise_definition(settings, causal):
    bias = randomized(BandedRelative(DIM, HEADS, **{"rank": 3, **settings}))
    x, q, k, v = drawn(2, 9, DIM), *(drawn(2, HEADS, 9, HEAD_DIM) for _ in range(3))
    scale = HEAD_DIM**-0.5

    def exact():
        tau = bias.queries(torch.ones_like(q))
        return attended(tau * q, k, v, by_pairs(bias, x), causal, scale)

    # 1e-6 is added to norms.
    assert_same_results(
        lambda: REFERENCE(bias.queries(q), k, v, bias(x), causal=causal),
        exact,
        named(bias, x=x, q=q, k=k, v=v),
        1e-5 if "max_norm" in settings else 1e-11,
    )


def config_of(make: type, layer: str, **settings):
    return make(
        hidden_size=DIM,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD_DIM,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=HEAD_DIM,
        sliding_window_size=5,
        rel_extent=7,
        d_rel=3,
        layer_types=[layer],
        log_scaling_alpha=0.4,
        attn_implementation="eager",
        **settings,
    )


def mask_of(distances: torch.Tensor, window: int | None) -> torch.Tensor:
    seen = (distances >= 0) & (distances < (window or len(distances)))
    mask = torch.zeros_like(distances, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    return mask[None, None]


def check_layer(layer, bias: BandedRelative, arguments: tuple, monkeypatch, sink: bool) -> None:
    """The layer has the same results with our attention instead of its dense bias."""
    x, positions = arguments[0], torch.arange(arguments[0].shape[1])
    distances = positions[:, None] - positions
    options = {
        "attention_mask": mask_of(distances, layer.sliding_window),
        "position_ids": positions[None],
        "relative_distance": distances,
    }

    def with_ours(module, q, k, v, mask, *, scaling, sinks=None, **_):
        window = layer.sliding_window
        k, v = k.contiguous(), v.contiguous()  # convolutions leave them transposed
        o, lse = REFERENCE(q, k, v, bias(x), window=window, scale=scaling, return_lse=True)
        if sink:
            o = o * torch.sigmoid(lse - sinks[..., 0])[..., None]
        return o.transpose(1, 2).contiguous(), None

    def run(implementation):
        layer.config._attn_implementation = implementation
        return layer(*arguments, **options)[0]

    interfaces = inkling.modeling_inkling.ALL_ATTENTION_FUNCTIONS
    monkeypatch.setitem(interfaces._global_mapping, "ours", with_ours)
    # The models compute probabilities in float32.
    assert_same_results(
        lambda: run("ours"), lambda: run("eager"), named(layer, x=x), tolerance=2e-6
    )


@pytest.mark.parametrize("floor", [None, 3])
@pytest.mark.parametrize("layer", ["hybrid", "hybrid_sliding"])
def test_equals_the_layers_of_inkling(layer, floor, monkeypatch):
    config = config_of(transformers.InklingTextConfig, layer, log_scaling_n_floor=floor)
    attention = randomized(inkling.modeling_inkling.InklingAttention(config, 0))
    own = {} if layer == "hybrid_sliding" else {"log_floor": floor, "log_alpha": 0.4}
    extent = 5 if layer == "hybrid_sliding" else 7
    bias = BandedRelative(DIM, 4, extent=extent, rank=3, **own)
    bias.r_proj, bias.proj = attention.r_proj, attention.rel_logits_proj.proj
    check_layer(attention, bias, (drawn(2, 11, DIM),), monkeypatch, sink=False)


@pytest.mark.parametrize("layer", ["hybrid", "hybrid_sliding"])
def test_equals_the_layers_of_inkling_2(layer, monkeypatch):
    norm = {"rel_l2_clip_threshold": 1.0, "qk_l2_clip_threshold": 2.0}
    config = config_of(transformers.Inkling2TextConfig, layer, log_scaling_n_floor=3, **norm)
    sliding = layer == "hybrid_sliding"
    name = "Inkling2SlidingAttention" if sliding else "Inkling2FullAttention"
    attention = randomized(getattr(inkling2.modeling_inkling2, name)(config, 0))
    own = {} if sliding else {"log_floor": 3, "log_alpha": 0.4}
    bias = BandedRelative(DIM, 4, extent=5 if sliding else 7, rank=3, max_norm=1.0, **own)
    theirs = attention.relative_position_bias
    bias.r_proj, bias.proj, bias.clip_scale = theirs.linear, theirs.proj, theirs.norm.scale
    inputs = (drawn(2, 11, DIM),) if sliding else tuple(drawn(2, 11, DIM) for _ in range(3))
    check_layer(attention, bias, inputs, monkeypatch, sink=True)


def test_decoding_steps_continue_positions():
    bias = randomized(BandedRelative(DIM, HEADS, extent=4, rank=2, log_floor=3))
    x, q = drawn(1, 9, DIM), drawn(1, HEADS, 9, HEAD_DIM)
    whole, last = bias(x), bias(x[:, 7:], positions=torch.arange(7, 9))
    torch.testing.assert_close(last.query_factors, whole.query_factors[:, :, 7:])
    torch.testing.assert_close(
        bias.queries(q[:, :, 7:], torch.tensor([[7, 8]])), bias.queries(q)[:, :, 7:]
    )


def test_initial_values_are_those_of_the_model():
    bias = BandedRelative(256, 8, extent=300, max_norm=8.0)
    shapes = {name: tuple(x.shape) for name, x in bias.state_dict().items()}
    assert shapes == {"r_proj.weight": (128, 256), "proj": (16, 300), "clip_scale": (8, 16)}
    for x in (bias.r_proj.weight, bias.proj):
        assert x.std().item() == pytest.approx(0.02, rel=0.1)
    assert (bias.clip_scale == 1).all()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: BandedRelative(8, 2, rank=129), ValueError, "rank is 129; it must be at most 128"),
        (lambda: BandedRelative(8, 2, extent=0), ValueError, "extent must be positive"),
        (lambda: BandedRelative(8, 2, log_floor=0), ValueError, "log_floor must be None or pos"),
        (lambda: BandedRelative(8, 2, max_norm="x"), TypeError, "max_norm must be a number"),
        (lambda: BandedRelative(8, 2)(torch.ones(2, 3, 9)), ValueError, r"x has shape \(2, 3, 9\)"),
        (lambda: BandedRelative(8, 2)(3), TypeError, "x must be a floating point tensor"),
        (
            lambda: BandedRelative(8, 2, log_floor=1)(
                torch.ones(2, 3, 8), positions=torch.arange(4)
            ),
            ValueError,
            r"positions has shape \(4,\); it must be \(N,\) or \(B, N\) with N = 3",
        ),
    ],
)
def test_errors_name_the_argument(make, error, message):
    with pytest.raises(error, match=message):
        make()
