"""Attention with biases of queries and distances: by this package, plain PyTorch and transformers.

Each function takes the inputs of a layer and returns the layer with the bias of `make`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DebertaV2Config
from transformers.models.deberta_v2 import modeling_deberta_v2

from bench.common.implementations import distances
from bench.common.layer import DIM, Inputs, Training
from biased_flash_attn import biased_flash_attn, biases
from biased_flash_attn.forms import Geometry

MAKE = {
    "banded": lambda heads, _: biases.BandedRelative(DIM, heads, extent=1024, rank=16),
    "shaw": lambda heads, head_dim: biases.Shaw(heads, head_dim, left=64),
    "transformer_xl": biases.TransformerXL,
    "disentangled": lambda heads, head_dim: biases.Disentangled(
        DIM, heads, head_dim, max_distance=512, buckets=256
    ),
    "gated_table": lambda heads, _: biases.GatedTable(DIM, heads),
}


def make(name: str, inputs: Inputs) -> nn.Module:
    """The module of a bias with reproducible parameters, in the dtype of q."""
    torch.manual_seed(0)
    module = MAKE[name](inputs.q.shape[1], inputs.q.shape[3]).to(inputs.q.dtype)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.1)
    return module


def is_causal(name: str) -> bool:
    return name != "disentangled"


def ours(
    inputs: Inputs, name: str, backend: str = "cpu", tolerance: float | None = None
) -> Training:
    module = make(name, inputs)
    q, k, v, x = inputs.q, inputs.k, inputs.v, inputs.x.to(inputs.q.dtype)
    settings = {"causal": is_causal(name), "tolerance": tolerance, "backend": backend}

    def attend() -> Tensor:
        bias = module(x, q, k)
        return biased_flash_attn(module.queries(q), k, v, bias, scale=module.scale, **settings)

    return Training(inputs, attend, module)


def factor_bytes(inputs: Inputs, name: str, *, trained: bool) -> int:
    """The bytes of factors, tables and changed queries, and of gradients of the first two if they
    are trained. Factors that are q or k need no memory."""
    module, n = make(name, inputs), inputs.q.shape[2]
    q, k, x = inputs.q, inputs.k, inputs.x.to(inputs.q.dtype)
    with torch.no_grad():
        geometry = Geometry(n, n, is_causal(name))
        form = module(x, q, k).lower(geometry, torch.float32, q.device)
        made = sum(t.nbytes for t in form.tensors if t is not q and t is not k)
        queries = module.queries(q)
    return made * (1 + trained) + (0 if queries is q else queries.nbytes)


def without_bias(inputs: Inputs, name: str) -> Training:
    """Our attention without any bias, causal if it is with the bias `name`."""
    q, k, v, causal = inputs.q, inputs.k, inputs.v, is_causal(name)
    return Training(inputs, lambda: biased_flash_attn(q, k, v, causal=causal, backend="cpu"))


def plain_pytorch(inputs: Inputs, name: str) -> Training:
    """With the N x N matrix of the bias, differentiated by autograd; causal."""
    module = make(name, inputs)
    q, k, v, scale = inputs.q, inputs.k, inputs.v, inputs.q.shape[3] ** -0.5
    d, hidden = distances(q.shape[2], q.device)
    d, x = d.long(), inputs.x.to(q.dtype)

    def attend() -> Tensor:
        s = scale * module.queries(q) @ k.mT + MATRICES[name](module, x, q, d)
        return s.masked_fill(hidden, -torch.inf).softmax(-1) @ v

    return Training(inputs, attend, module)


def banded(module: biases.BandedRelative, x: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """The profiles of all distances of each query, gathered, as in transformers."""
    factors = module.r_proj(x).unflatten(-1, (module.num_heads, module.rank)).transpose(1, 2)
    profiles = factors @ module.proj
    return gathered(profiles, d).masked_fill(d >= module.extent, 0)


def shaw(module: biases.Shaw, x: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """The products with the vectors of all distances, gathered."""
    return gathered(q @ module.table(torch.arange(module.left + 1)), d)


def gathered(products: Tensor, d: Tensor) -> Tensor:
    """Products (B, H, N, n) of each query at distances d (N, N), of which the last repeats."""
    nearest = d.clamp(max=products.shape[-1] - 1)
    return products.gather(-1, nearest.expand(*products.shape[:2], -1, -1))


def transformer_xl(module: biases.TransformerXL, x: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """The relative shift of the paper's code: the rows are shifted by a view of padded rows."""
    n = q.shape[2]
    r = module.table(torch.arange(n - 1, -1, -1.0))
    products = F.pad((q + module.v[:, None]) @ r, (1, 0))
    return products.view(*q.shape[:2], n + 1, n)[:, :, 1:]


def gated_table(module: biases.GatedTable, x: Tensor, q: Tensor, d: Tensor) -> Tensor:
    """The table of all pairs, multiplied by the gates of the queries, as in transformers."""
    table = module.values(torch.arange(len(d)))[:, 0]
    return module(x).query_factors * table[:, d]


MATRICES = {
    "banded": banded,
    "shaw": shaw,
    "transformer_xl": transformer_xl,
    "gated_table": gated_table,
}


def sdpa_with_dense_bias(inputs: Inputs, name: str) -> Training:
    """PyTorch's fused attention with the N x N matrix, which gets no gradient."""
    module = make(name, inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    d, hidden = distances(q.shape[2], q.device)
    d, x = d.long(), inputs.x.to(q.dtype)

    def attend() -> Tensor:
        with torch.no_grad():
            mask = MATRICES[name](module, x, q, d).masked_fill_(hidden, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Training(inputs, attend)


def transformers_layer(inputs: Inputs, name: str) -> Training:
    """DeBERTa v2's own attention of given q, k and v."""
    module, heads, n = make(name, inputs), inputs.q.shape[1], inputs.q.shape[2]
    config = DebertaV2Config(
        hidden_size=DIM,
        num_attention_heads=heads,
        attention_head_size=inputs.q.shape[3],
        relative_attention=True,
        position_buckets=module.buckets,
        max_relative_positions=module.max_distance,
        pos_att_type=list(module.terms),
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    layer = modeling_deberta_v2.DisentangledSelfAttention(config)
    layer.pos_key_proj, layer.pos_query_proj = module.pos_key, module.pos_query
    layer.query_proj, layer.key_proj, layer.value_proj = (
        Given(x) for x in (inputs.q, inputs.k, inputs.v)
    )
    states, pairs = torch.empty(len(inputs.q), n, 0), torch.ones(1, 1, n, n, dtype=torch.bool)
    relative = modeling_deberta_v2.build_relative_position(
        states, states, module.buckets, module.max_distance
    )

    def attend() -> Tensor:
        o, _ = layer(states, pairs, relative_pos=relative, rel_embeddings=module.embeddings.weight)
        return o.unflatten(-1, (heads, -1)).transpose(1, 2)

    return Training(inputs, attend, module)


class Given(nn.Module):
    """A projection whose result (batch, heads, N, head_dim) is given."""

    def __init__(self, heads: Tensor):
        super().__init__()
        self.heads = heads

    def forward(self, states: Tensor) -> Tensor:
        return self.heads.transpose(1, 2).flatten(2)
