"""The interface of biases whose form has tables over distances, which a cache of decoding keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from ..forms import Form, Geometry


class Tabulated:
    """A bias whose form has tables (`Form.tables`), which depend only on distances and parameters.

    In decoding, the tables are kept from step to step and evaluated at new distances only
    (decoding/distance_tables.py). `lower` gives the same forms.
    """

    def table_sources(self) -> tuple:
        """The objects and tensors that determine everything in the form except for what belongs to
        queries and keys.

        It is the same if these are equal objects and unmodified tensors. By default, they are the
        bias, a module, with its parameters and buffers.
        """
        return self, *self.parameters(), *self.buffers()

    def table_length(self, geometry: Geometry) -> int:
        """The number of distances in the tables, from 0 on, if attention is causal."""
        return geometry.n_distances

    def tables(self, d: Tensor) -> tuple[Tensor, ...]:
        """The form's tables at distances d (n,) in float64, with any number of heads that
        broadcasts, and in any dtype."""
        raise NotImplementedError(f"{type(self).__name__} must define tables(d)")

    def over(self, form: Form, geometry: Geometry, dtype: torch.dtype) -> Form:
        """The form over the queries and keys of a geometry; `form` has everything else. dtype:
        float32 or float64."""
        return form
