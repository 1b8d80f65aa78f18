"""A problem as the arguments of an operator, which takes no objects but tensors, and of a kernel.

The schemas of the operators, the names of the arguments and the conversions are generated from the
fields of `Problem` and of the records in it. All arguments of an optional record that is absent are
None.
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


def _fields(record: type, omitted: str = "") -> list[_Field]:
    found = []
    for name, hint in get_type_hints(record).items():
        is_optional = get_origin(hint) is types.UnionType
        if name != omitted:
            cls = get_args(hint)[0] if is_optional else hint
            found.append(_Field(name, cls, is_optional))
    return found


def _types(fields: list[_Field], is_optional: bool = False) -> dict[str, str]:
    """The names of the arguments of a record, and their types."""
    found = {}
    for field in fields:
        may_be_none = is_optional or field.is_optional
        if field.cls is Form:
            found |= {"form_tensors": "Tensor[]", "form": "str"}
        elif field.cls in _SCHEMA_TYPES:
            found[field.name] = _SCHEMA_TYPES[field.cls] + "?" * may_be_none
        else:
            found |= _types(_fields(field.cls), may_be_none)
    return found


def _values(fields: list[_Field], path: str) -> str:
    """The source code of the values of the arguments of the record at `path`."""
    found = []
    for field in fields:
        value = f"{path}.{field.name}"
        if field.cls is Form:
            found += [f"[*{value}.tensors]", f"{value}.name"]
        elif field.cls in _SCHEMA_TYPES:
            found.append(value)
        else:
            own = _fields(field.cls)
            values = _values(own, value)
            if field.is_optional:
                values = f"*({(None,) * len(_types(own))} if {value} is None else ({values}))"
            found.append(values)
    return ", ".join(found)


def _named(fields: list[_Field], path: str) -> str:
    """The source code of the items of a dictionary of the arguments of the record at `path`, with
    the function `tensor` applied to tensors. Those of an optional record that is absent are left
    out."""
    found = []
    for field in fields:
        value = f"{path}.{field.name}"
        if field.cls is Form:
            found.append(f"'form_tensors': [tensor(x) for x in {value}.tensors]")
            found.append(f"'form': {value}.name")
        elif field.cls is Tensor:
            found.append(f"'{field.name}': tensor({value})")
        elif field.cls in _SCHEMA_TYPES:
            found.append(f"'{field.name}': {value}")
        else:
            items = _named(_fields(field.cls), value)
            if field.is_optional:
                items = f"**({{}} if {value} is None else {{{items}}})"
            found.append(items)
    return ", ".join(found)


def _construction(record: type, fields: list[_Field], classes: dict[str, Callable]) -> str:
    """The source code that makes a record from its arguments; adds the classes that it uses."""
    classes[record.__name__] = record
    found = []
    for field in fields:
        if field.cls is Form:
            found.append(f"{field.name}=from_tensors(form, form_tensors)")
        elif field.cls in _SCHEMA_TYPES:
            found.append(f"{field.name}={field.name}")
        else:
            own = _fields(field.cls)
            # The first field of an optional record is a tensor.
            is_absent = f"None if {own[0].name} is None else " * field.is_optional
            found.append(f"{field.name}={is_absent}{_construction(field.cls, own, classes)}")
    return f"{record.__name__}({', '.join(found)})"


class Signature:
    """The arguments that describe a problem.

    schema: their declaration. There are no defaults, because PyTorch drops arguments equal to their
        default, and there must be as many gradients as arguments.
    Named: the class of tuples of them.
    flat: maps a problem to a tuple of them.
    rebuilt: maps them to a problem.
    settings: maps them to a dictionary of those that are not tensors.

    Functions made from source code, like those of a dataclass, take half the time of loops over the
    fields, which would be a tenth of a short call.
    """

    def __init__(self, omitted: str = ""):
        """omitted: an optional field of the problem that is None."""
        fields, classes = _fields(Problem, omitted), {"from_tensors": from_tensors}
        names = _types(fields)
        made = _construction(Problem, fields, classes)
        self.schema = ", ".join(f"{kind} {name}" for name, kind in names.items())
        self.Named = namedtuple("Named", names)
        self.flat: Callable[[Problem], tuple] = eval(
            f"lambda problem: ({_values(fields, 'problem')})"
        )
        self.rebuilt: Callable[..., Problem] = eval(f"lambda {', '.join(names)}: {made}", classes)
        settings = [f"'{name}': {name}" for name, kind in names.items() if "Tensor" not in kind]
        self.settings: Callable[..., dict] = eval(
            f"lambda {', '.join(names)}: {{{', '.join(settings)}}}"
        )


ATTENTION = Signature(omitted="pages")
DECODING = Signature()
# Maps a problem and a function of a tensor or None to the arguments of a kernel, by name.
by_name: Callable[[Problem, Callable], dict] = eval(
    f"lambda problem, tensor: {{{_named(_fields(Problem), 'problem')}}}"
)
