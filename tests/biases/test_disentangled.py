"""The terms of DeBERTa from content to position and from position to content."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models import deberta, deberta_v2

from biased_flash_attn.biases import Disentangled
from tests.biases.relative_cases import (
    REFERENCE,
    assert_same_results,
    attended,
    drawn,
    named,
    randomized,
)

HEADS, HEAD_DIM = 3, 4
DIM = HEADS * HEAD_DIM
TERMS = [("c2p", "p2c"), ("c2p",), ("p2c",)]


def bucket(d: int, buckets: int, max_distance: int) -> int:
    """The smallest bucket b of far distances with |d| <= half ((max - 1) / half)^((b - half) /
    (half - 1)), in integer arithmetic."""
    half, n = buckets // 2, abs(d)
    if n <= half:
        return d
    wide, b = half - 1, half
    while n**wide * half ** (b - half) > (max_distance - 1) ** (b - half) * half**wide:
        b += 1
    return b if d > 0 else -b


def by_pairs(module: Disentangled, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The paper's delta(i, j) and its products (section 3.1), one pair at a time."""
    n, span = q.shape[2], module.span
    e, dense = module.embeddings.weight, []
    for i in range(n):
        for j in range(n):
            d = i - j
            if module.buckets is not None:
                d = bucket(d, module.buckets, module.max_distance)
            delta = 0 if d <= -span else 2 * span - 1 if d >= span else d + span
            pair = 0
            for linear, x in ((module.pos_key, q[:, :, i]), (module.pos_query, k[:, :, j])):
                if linear is not None:
                    vector = linear(e[delta]).unflatten(-1, (HEADS, HEAD_DIM))
                    pair = pair + (x * vector).sum(-1)
            dense.append(pair)
    return module.scale * torch.stack(dense, -1).unflatten(-1, (n, n))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("settings", [(3, None), (30, None), (8, 4), (9, 8), (40, 6)])
def test_results_equal_the_pairwise_definition(settings, terms, causal):
    max_distance, buckets = settings
    module = randomized(
        Disentangled(DIM, HEADS, max_distance=max_distance, buckets=buckets, terms=terms)
    )
    q, k, v = (drawn(2, HEADS, 12, HEAD_DIM) for _ in range(3))
    assert module.scale == pytest.approx((HEAD_DIM * (1 + len(terms))) ** -0.5)
    assert_same_results(
        lambda: REFERENCE(q, k, v, module(q=q, k=k), causal=causal, scale=module.scale),
        lambda: attended(q, k, v, by_pairs(module, q, k), causal, module.scale),
        named(module, q=q, k=k, v=v),
    )


# In the last three, rounding errors of logarithms would change the integer.
@pytest.mark.parametrize(
    ("buckets", "max_distance"),
    [(256, 512), (32, 128), (8, 24), (4, 40), (70, 42), (26, 70), (52, 139)],
)
def test_buckets_equal_integer_arithmetic(buckets, max_distance):
    module = Disentangled(4, 1, max_distance=max_distance, buckets=buckets)
    d = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    exact = [
        min(max(bucket(x, buckets, max_distance) + buckets, 0), 2 * buckets - 1) for x in d.tolist()
    ]
    assert module.index(d.double()).tolist() == exact


@pytest.mark.parametrize(("buckets", "max_distance"), [(256, 512), (32, 128)])
def test_buckets_are_those_of_transformers(buckets, max_distance):
    module = Disentangled(4, 1, max_distance=max_distance, buckets=buckets)
    d = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    theirs = deberta_v2.modeling_deberta_v2.make_log_bucket_position(d, buckets, max_distance)
    assert torch.equal(
        module.index(d.double()), (theirs.long() + buckets).clamp(0, 2 * buckets - 1)
    )


def heads_of(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


def check(layer, module: Disentangled, qkv, e, relative, x) -> None:
    """Compares the tokens of a padded batch."""
    mask = torch.ones(2, x.shape[1], dtype=torch.bool)
    mask[0, 9:] = False
    pairs = (mask[:, None, :, None] & mask[:, None, None]).expand(2, 1, -1, -1)

    def ours():
        q, k, v = qkv(x)
        o = REFERENCE(
            q,
            k,
            v,
            module(q=q, k=k, embeddings=e),
            causal=False,
            scale=module.scale,
            key_padding_mask=mask,
        )
        return o.transpose(1, 2).flatten(2) * mask[..., None]

    def exact():
        o, _ = layer(x, pairs, relative_pos=relative, rel_embeddings=e)
        return o * mask[..., None]

    # transformers computes the scale in float32.
    assert_same_results(ours, exact, named(layer, x=x, e=e), tolerance=1e-6)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("max_distance", [4, 20])
def test_equals_the_layers_of_deberta(max_distance, terms):
    config = transformers.DebertaConfig(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        relative_attention=True,
        max_relative_positions=max_distance,
        pos_att_type=[*terms],
    )
    layer = randomized(deberta.modeling_deberta.DisentangledSelfAttention(config))
    module = Disentangled(DIM, HEADS, max_distance=max_distance, terms=terms, key_bias=False)
    module.pos_key = getattr(layer, "pos_proj", None)
    module.pos_query = getattr(layer, "pos_q_proj", None)
    x, e = drawn(2, 12, DIM), drawn(2 * max_distance, DIM)

    def qkv(x):
        q, k, v = heads_of(layer.in_proj(x)).chunk(3, -1)
        return q + heads_of(layer.q_bias[None, None]), k, v + heads_of(layer.v_bias[None, None])

    check(layer, module, qkv, e, deberta.modeling_deberta.build_relative_position(x, x), x)


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("max_distance", "buckets"), [(6, None), (9, 4), (20, 8)])
def test_equals_the_layers_of_deberta_v2(max_distance, buckets, shared, terms):
    config = transformers.DebertaV2Config(
        hidden_size=DIM,
        num_attention_heads=HEADS,
        relative_attention=True,
        max_relative_positions=max_distance,
        position_buckets=-1 if buckets is None else buckets,
        share_att_key=shared,
        pos_att_type=[*terms],
    )
    layer = randomized(deberta_v2.modeling_deberta_v2.DisentangledSelfAttention(config))
    module = Disentangled(DIM, HEADS, max_distance=max_distance, buckets=buckets, terms=terms)
    if "c2p" in terms:
        module.pos_key = layer.key_proj if shared else layer.pos_key_proj
    if "p2c" in terms:
        module.pos_query = layer.query_proj if shared else layer.pos_query_proj
    x, e = drawn(2, 12, DIM), drawn(2 * module.span, DIM)

    def qkv(x):
        return tuple(heads_of(f(x)) for f in (layer.query_proj, layer.key_proj, layer.value_proj))

    settings = {"bucket_size": config.position_buckets, "max_position": max_distance}
    relative = deberta_v2.modeling_deberta_v2.build_relative_position(x, x, **settings)
    check(layer, module, qkv, e, relative, x)


def test_initial_values_are_those_of_the_authors():
    module = Disentangled(96, 4, buckets=256)
    shapes = {name: tuple(x.shape) for name, x in module.state_dict().items()}
    assert shapes == {
        "embeddings.weight": (512, 96),
        "pos_key.weight": (96, 96),
        "pos_key.bias": (96,),
        "pos_query.weight": (96, 96),
        "pos_query.bias": (96,),
    }
    assert module.embeddings.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not module.pos_key.bias.any()
    assert Disentangled(96, 4, key_bias=False).pos_key.bias is None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Disentangled(10, 3), ValueError, "dim is 10; .* it must divide into 3"),
        (lambda: Disentangled(8, 2, 129), ValueError, "head_dim is 129"),
        (lambda: Disentangled(8, 2, terms=()), ValueError, r"terms is \(\); it must be"),
        (lambda: Disentangled(8, 2, buckets=5), ValueError, "buckets is 5; it must be None or ev"),
        (
            lambda: Disentangled(8, 2, buckets=14, max_distance=8),
            ValueError,
            "buckets is 14; it must be None or even, from 4 to 12",
        ),
        (
            lambda: Disentangled(8, 2)(q=torch.ones(1, 2, 5, 4), k=torch.ones(1, 3, 5, 4)),
            ValueError,
            r"k has shape \(1, 3, 5, 4\); it must be \(B, 2, N, 4\)",
        ),
        (
            lambda: Disentangled(8, 2, max_distance=3)(
                q=torch.ones(1, 2, 5, 4), k=torch.ones(1, 2, 5, 4), embeddings=torch.ones(5, 8)
            ),
            ValueError,
            r"embeddings has shape \(5, 8\); it must be \(6, 8\)",
        ),
    ],
)
def test_errors_name_the_argument(make, error, message):
    with pytest.raises(error, match=message):
        make()
