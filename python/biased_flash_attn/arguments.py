"""A problem as the flat arguments of an operator, which takes no objects but tensors.

The schema of the operators, the names of their arguments and the conversions in both directions are
generated from the fields of `Problem` and of the records in it. All arguments of an optional record
that is absent are None.
"""

from __future__ import annotations

import types
from collections import namedtuple
from collections.abc import Callable
from typing import NamedTuple, get_args, get_origin, get_type_hints

from torch import Tensor

from .forms import Form, from_tensors
from .problem import Problem

_SCHEMA_TYPES = {Tensor: "Tensor", float: "float", bool: "bool", str: "str", int: "SymInt"}


class _Field(NamedTuple):
    """A field of a record: the class of its value, and whether it may be None."""

    name: str
    cls: type
    is_optional: bool


def _fields(record: type) -> list[_Field]:
    found = []
    for name, hint in get_type_hints(record).items():
        is_optional = get_origin(hint) is types.UnionType
        found.append(_Field(name, get_args(hint)[0] if is_optional else hint, is_optional))
    return found


def _arguments(record: type, is_optional: bool = False) -> dict[str, str]:
    """The names of the arguments of a record, and their types."""
    found = {}
    for field in _fields(record):
        may_be_none = is_optional or field.is_optional
        if field.cls is Form:
            found |= {"form_tensors": "Tensor[]", "form": "str"}
        elif field.cls in _SCHEMA_TYPES:
            found[field.name] = _SCHEMA_TYPES[field.cls] + "?" * may_be_none
        else:
            found |= _arguments(field.cls, may_be_none)
    return found


def _values(record: type, path: str) -> str:
    """The source code of the values of the arguments of the record at `path`."""
    found = []
    for field in _fields(record):
        value = f"{path}.{field.name}"
        if field.cls is Form:
            found += [f"[*{value}.tensors]", f"{value}.name"]
        elif field.cls in _SCHEMA_TYPES:
            found.append(value)
        elif field.is_optional:
            absent = (None,) * len(_arguments(field.cls))
            found.append(f"*({absent} if {value} is None else ({_values(field.cls, value)}))")
        else:
            found.append(_values(field.cls, value))
    return ", ".join(found)


def _construction(record: type, classes: dict[str, Callable]) -> str:
    """The source code that makes a record from its arguments; adds the classes that it uses."""
    classes[record.__name__] = record
    found = []
    for field in _fields(record):
        if field.cls is Form:
            found.append("from_tensors(form, form_tensors)")
        elif field.cls in _SCHEMA_TYPES:
            found.append(field.name)
        else:
            # The first field of an optional record is a tensor.
            is_absent = f"None if {_fields(field.cls)[0].name} is None else " * field.is_optional
            found.append(is_absent + _construction(field.cls, classes))
    return f"{record.__name__}({', '.join(found)})"


_TYPES = _arguments(Problem)
_CLASSES: dict[str, Callable] = {"from_tensors": from_tensors}
# There are no defaults, because PyTorch drops arguments equal to their default, and there must be
# as many gradients as arguments.
SCHEMA = ", ".join(f"{kind} {name}" for name, kind in _TYPES.items())
# The arguments by name.
Arguments = namedtuple("Arguments", _TYPES)
# Functions made from source code, like those of a dataclass, take half the time of loops over the
# fields, which would be a tenth of a short call.
flat: Callable[[Problem], tuple] = eval(f"lambda problem: ({_values(Problem, 'problem')})")
rebuilt: Callable[..., Problem] = eval(
    f"lambda {', '.join(_TYPES)}: {_construction(Problem, _CLASSES)}", _CLASSES
)
