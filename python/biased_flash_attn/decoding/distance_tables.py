"""The tables of a bias over distances, which grow with a cache; each distance is evaluated once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..biases.tabulated import Tabulated
from ..forms import Form
from ..shared_constants import PEAK_DISTANCES

_COMPARED = 2**14  # the largest number of values, whose comparison takes few microseconds
Extremes = tuple[Tensor | None, Tensor | None]


class DistanceTables:
    """A form without its queries and keys, whose tables can be extended, and the extremes of their
    blocks of PEAK_DISTANCES distances.

    `is_of` detects changes of what the tables are made from, as far as these are objects and
    tensors: other objects and tensors, in-place operations, and any change of the values of small
    tensors on CPUs. Nothing else may change: neither the values of larger tensors through `.data`,
    nor what a function reads from containers, attributes or through other functions. Tensors whose
    changes cannot be detected, large ones created in inference mode, are taken for changed.
    """

    def __init__(self, bias: Tabulated, form: Form):
        # The sources are kept alive, so that no others can have their addresses.
        self.sources = bias.table_sources()
        self.versions = _versions(self.sources)
        self.values = [(x.detach(), x.clone()) for x in self.sources if _is_compared(x)]
        form = form.for_queries(slice(0, 0)).for_keys(slice(0, 0))
        # Copies do not keep the tensors of the call's tokens alive.
        self.form = form.with_tensors([x.clone() for x in form.tensors])
        self.tables = self.form.tables
        self.extremes: Extremes = self.form.extremes(PEAK_DISTANCES)
        self.length = self.tables[0].shape[-1]

    def is_of(self, bias: Tabulated) -> bool:
        if self.versions != _versions(bias.table_sources()):
            return False
        return all(torch.equal(now, before) for now, before in self.values)

    def upto(self, length: int, bias: Tabulated) -> Form:
        """Returns the form with tables of `length` distances."""
        if length > self.length:
            self._extend(length, bias)
        return self.form.with_tables([x[..., :length] for x in self.tables])

    def extremes_upto(self, length: int) -> Extremes:
        """Returns the extremes of the blocks of the first `length` distances."""
        blocks = -(-length // PEAK_DISTANCES)
        lowest, highest = (None if x is None else x[..., :blocks] for x in self.extremes)
        return lowest, highest

    @torch.no_grad()
    def _extend(self, length: int, bias: Tabulated) -> None:
        """Evaluates only the new distances; a function may not accept larger ones."""
        device = self.tables[0].device
        new = bias.tables(torch.arange(self.length, length, dtype=torch.float64, device=device))
        new = [x.to(y.dtype) for x, y in zip(new, self.tables, strict=True)]
        refuse_undefined(self.form.with_tables(new), self.form.tensors)
        if length > self.tables[0].shape[-1]:
            blocks = -(-length // PEAK_DISTANCES), 2 * -(-self.length // PEAK_DISTANCES)
            capacity = max(blocks) | 1  # odd, so that rows do not compete for sets of the CPU cache
            self.tables = [_longer(x, capacity * PEAK_DISTANCES) for x in self.tables]
            self.extremes = tuple(x if x is None else _longer(x, capacity) for x in self.extremes)
        for own, added in zip(self.tables, new, strict=True):
            own[..., self.length : length] = added
        first = self.length // PEAK_DISTANCES
        changed = [x[..., first * PEAK_DISTANCES : length] for x in self.tables]
        extremes = self.form.with_tables(changed).extremes(PEAK_DISTANCES)
        for own, blocks in zip(self.extremes, extremes, strict=True):
            if own is not None:
                own[..., first : first + blocks.shape[-1]] = blocks
        self.length = length


def refuse_undefined(form: Form, checked: tuple[Tensor, ...]) -> None:
    """Raises ValueError for NaN, or infinity where a form does not permit it, in tensors that are
    not among those checked before, like the CPU kernels; on GPUs the check would synchronize."""
    for x, name in zip(form.tensors, form.tensor_names, strict=False):
        if x.device.type != "cpu" or any(x is y for y in checked):
            continue
        if x.sum().isnan() and x.isnan().any():
            raise ValueError(f"bias: its {name} contain NaN")
        if form.refuses_infinity and x.isposinf().any():
            raise ValueError(
                f"bias: its {name} contain inf; they must be finite, or -inf to hide keys"
            )


def _longer(x: Tensor, length: int) -> Tensor:
    # Tensors made in inference mode could not be written to outside of it.
    with torch.inference_mode(False):
        longer = x.new_empty((*x.shape[:-1], length))
        longer[..., : x.shape[-1]] = x
    return longer


def _versions(sources: tuple) -> list:
    """Returns the sources, with the addresses and version counters of tensors in their place."""
    return [_version(x) if isinstance(x, Tensor) else x for x in sources]


def _version(x: Tensor) -> tuple:
    """Identifies a tensor and its values, except for changes through `.data`. Tensors of inference
    mode have no version counter: it identifies them if they are compared, and otherwise never."""
    version = None
    if not x.is_inference():
        version = x._version
    elif not _is_compared(x):
        version = object()  # unequal to any other
    return x.data_ptr(), x.shape, x.stride(), x.dtype, version


def _is_compared(x: object) -> bool:
    """Whether changes are also detected by the values: on GPUs that would synchronize."""
    return isinstance(x, Tensor) and x.device.type == "cpu" and x.numel() <= _COMPARED
