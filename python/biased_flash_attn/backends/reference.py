"""The reference implementation of attention with an additive bias, which defines the results.

    s_ij  = scale * q_i . k_j + b_ij
    o_i   = sum_j exp(s_ij - lse_i) v_j
    lse_i = log sum_j exp(s_ij)             sums over the keys j visible to query i

Non-finite numbers propagate through visible pairs as in IEEE arithmetic, and never through masked
pairs. A query without visible keys, or with only logits of -inf, has o = 0, lse = -inf and zero
gradients.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..geometry import Geometry
from ..problem import Problem
from ..sequences import Sequences, with_layout_of
from ..tracing import is_mapped, values_of
from .protocol import ATTENTION, DECODING, Report


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, geometry: Geometry, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns o (B, H, n_query, Dv) in q's dtype, and lse (B, H, n_query), at least float32.

    q (B, H, n_query, D); k (B, Hkv, n_key, D) and v (B, Hkv, n_key, Dv), H a multiple of Hkv; bias
    broadcasts to (B, H, n_query, n_key), or is None. All arithmetic is in q's dtype, so that its
    error is a baseline for the accuracy of the kernels.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    visible = geometry.visible(q.device)

    s = scale * logits(q, k, visible)
    if bias is not None:
        s = s + bias.to(s.dtype)
    s = torch.where(visible, s, -torch.inf)

    # m only keeps exp in range. The results do not depend on it, so its gradient is zero.
    no_key = s.new_full((*s.shape[:3], 1), -torch.inf)
    m = s.amax(-1, keepdim=True).detach() if geometry.n_key else no_key
    sees = m != -torch.inf
    m = torch.where(sees, m, 0)
    p = torch.exp(s - m)
    l = torch.where(sees, p.sum(-1, keepdim=True), 1)  # noqa: E741

    o = mix(p, v, visible & sees) / l
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = torch.where(sees, m.to(wide) + torch.log(l.to(wide)), -torch.inf)
    return o, lse.squeeze(-1)


def logits(q: Tensor, k: Tensor, visible: Tensor) -> Tensor:
    """Returns q k^T; the gradients of q and k sum over visible pairs only."""
    if all_finite(q, k):
        return q @ k.mT
    # A matrix product would include 0 * NaN of masked pairs.
    return (q[..., :, None, :] * k[..., None, :, :].where(visible[..., None], 0)).sum(-1)


def mix(p: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Returns p v; the product and its gradients sum over visible pairs only."""
    if all_finite(p, v):
        return p @ v
    return (p[..., :, :, None] * v[..., None, :, :].where(visible[..., None], 0)).sum(-2)


def all_finite(*tensors: Tensor) -> bool:
    return all(bool(values_of(x).isfinite().all()) for x in tensors)


class Reference:
    """Plain PyTorch on any device, in O(N^2) memory. Half precision is computed in float32."""

    name = "reference"
    device_type = None
    has_kernels = False
    calls = frozenset({ATTENTION, DECODING})

    def report(self) -> Report:
        return Report(self.name, True, "plain PyTorch on any device; O(N^2) memory")

    def refusal(self, problem: Problem) -> str:
        if problem.sequences is not None and is_mapped(problem.sequences.rows):
            return "reads key_padding_mask or cu_seqlens, over which vmap maps"
        return ""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor]:
        sequences, q = problem.sequences, problem.q
        if sequences is None or len(sequences.rows) == 0:
            geometry = problem.geometry
            rows = q.shape[2], problem.k.shape[2]
            o, lse = _attend(problem, Geometry(*rows, geometry.causal, geometry.window))
        else:
            each = [_attend(one, one.geometry) for one in problem.each_sequence()]
            o, lse = _joined(each, sequences)
        return with_layout_of(q, o.to(q.dtype)), lse

    def decode(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Computes one sequence after the other, with its visible keys gathered from their
        pages."""
        lengths = problem.pages.lengths.tolist()
        each = [_of_pages(problem, b, length) for b, length in enumerate(lengths)]
        each = [_attend(one, one.geometry) for one in each]
        o, lse = (torch.cat(x) for x in zip(*each, strict=True))
        return with_layout_of(problem.q, o.to(problem.q.dtype)), lse

    def append(self, pages: Tensor, rows: Tensor, block_table: Tensor, lengths: Tensor) -> None:
        keys = lengths[:, None] + torch.arange(-rows.shape[2], 0, device=lengths.device)
        columns = keys // pages.shape[2] % block_table.shape[1]
        page = block_table.gather(1, columns).long()
        pages[page, :, keys % pages.shape[2]] = rows.transpose(1, 2)


def _attend(problem: Problem, geometry: Geometry) -> tuple[Tensor, Tensor]:
    real, q = problem.real, problem.q
    bias = _saturated(problem.form.dense(geometry), real)
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(real) for x in (q, problem.k, problem.v))
        return attention(q, k, v, bias, geometry, problem.scale)


def _saturated(bias: Tensor, real: torch.dtype) -> Tensor:
    """Returns the bias in another dtype, in which finite values stay finite."""
    largest = torch.finfo(real).max
    return torch.where(bias.isfinite(), bias.clamp(-largest, largest), bias).to(real)


def _joined(results: list[tuple[Tensor, Tensor]], sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Concatenates the results of packed sequences, or pads those of batch entries with o = 0 and
    lse = -inf."""
    if sequences.is_packed:
        o, lse = (torch.cat(x, 2) for x in zip(*results, strict=True))
        return o, lse
    padded = []
    for (o, lse), rows in zip(results, sequences, strict=True):
        around = rows.first_query, sequences.query_rows - rows.first_query - rows.n_query
        padded.append((pad(o, (0, 0, *around)), pad(lse, around, value=-torch.inf)))
    o, lse = (torch.cat(x) for x in zip(*padded, strict=True))
    return o, lse


def _of_pages(problem: Problem, b: int, length: int) -> Problem:
    """Returns the problem of one sequence of a cache, with its visible keys gathered from the
    pages."""
    window, n_query, pages = problem.geometry.window, problem.q.shape[2], problem.pages
    first = 0 if window is None else max(0, length - n_query - window + 1)
    key = torch.arange(first, length, device=problem.k.device)
    page_size, columns = problem.k.shape[2], pages.block_table.shape[1]
    page = pages.block_table[b, key // page_size % columns].long()

    def stored(x: Tensor) -> Tensor:
        return x[page, :, key % page_size].transpose(0, 1)[None]

    form = problem.form
    if form.state is not None:
        form = form.with_state(stored(form.state))
    else:
        form = form.for_keys(slice(first, length))
    return replace(
        problem,
        q=problem.q[b : b + 1],
        k=stored(problem.k),
        v=stored(problem.v),
        form=form.for_entry(b),
        geometry=Geometry(n_query, length - first, True, window),
    )
