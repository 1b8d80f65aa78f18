"""How objects with large tensors are printed."""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor


class ShownByShapes:
    """A dataclass, with repr=False, whose repr has the shapes of its tensors in place of values."""

    def __repr__(self) -> str:
        shown = (f"{field.name}={_shown(getattr(self, field.name))}" for field in fields(self))
        return f"{type(self).__name__}({', '.join(shown)})"


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} {tuple(value.shape)}"
    # The repr of a method contains that of its object.
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)
