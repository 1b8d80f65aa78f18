"""Biases that are stored as a matrix, with one value per pair of query and key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import sequences
from ..geometry import Geometry
from .base import Layout, register
from .chunk_pairs import Pair
from .other_tokens import DecodableForm, DistributableForm


@dataclass(frozen=True, eq=False, repr=False)
class Dense(DecodableForm, DistributableForm):
    """b_ij = bias[..., i, j], bias (B or 1, H or 1, query_rows, key_rows), with any strides.

    It is float64 for float64 inputs, else float32, bfloat16 or float16. Rows and columns are those
    of q and k, which packed sequences share; only pairs within a sequence are read.
    """

    bias: Tensor

    name = "dense"
    tensor_names = ("values",)
    per_row = True
    per_pair = True

    @property
    def tensors(self) -> tuple[Tensor]:
        return (self.bias,)

    def layouts(self, geometry: Geometry, real: torch.dtype) -> list[Layout]:
        dtype = real if real == torch.float64 or self.bias.dtype == torch.float64 else None
        rows = geometry.query_rows, geometry.key_rows
        return [Layout(self.bias, dtype or self.bias.dtype, rows)]

    def dense(self, geometry: Geometry) -> Tensor:
        return self.bias.double()

    def accumulators(self, batch: int, sequences: int, heads: int) -> list[Tensor]:
        """Of the dtype of the bias, unless those of several heads or batch entries are summed."""
        shape = batch, heads, *self.bias.shape[2:]
        real = torch.promote_types(self.bias.dtype, torch.float32)
        dtype = self.bias.dtype if self.bias.shape == shape else real
        return [self.bias.new_zeros(shape, dtype=dtype)]

    def for_sequence(self, rows: sequences.Sequence, whole: Geometry, own: Geometry) -> Dense:
        return Dense(rows.keys(rows.queries(self.bias).mT).mT)

    def for_queries(self, queries: slice) -> Dense:
        return Dense(self.bias[:, :, queries])

    def for_keys(self, keys: slice) -> Dense:
        return Dense(self.bias[..., keys])

    def for_pair(self, pair: Pair, states: None) -> Dense:
        return self.for_keys(slice(pair.key_chunk * pair.n, (pair.key_chunk + 1) * pair.n))


register(Dense.name, lambda tensors: Dense(*tensors))
