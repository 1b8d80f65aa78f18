"""Position schemes of models: an attention bias, or one of the baselines of the papers."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..biases import NAMED
from ..biases.base import Bias
from .named_biases import make, options_of

BASELINES = ("none", "sinusoidal", "learned", "rotary")
CALL = re.compile(r"([^()]+)\((.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Positions:
    """A position scheme. `positions(name)` returns a scheme by its name.

    Args:
        bias: a function of num_heads and dim that creates a `Bias`; None for no bias.
        embedding: "sinusoidal" or "learned" embeddings, which are added to those of tokens; None
            for no embeddings.
        rotary: whether queries and keys are rotated by their positions (Su et al., 2021).
        window: if given, the number of past keys that a query sees, including its own position.
    """

    bias: Callable[[int, int], Bias] | None = None
    embedding: str | None = None
    rotary: bool = False
    window: int | None = None


def positions(scheme: str | Positions) -> Positions:
    """The scheme `name`: a bias, "none", "sinusoidal", "learned", "rotary" or "window(WIDTH)".

    A bias may have the keyword arguments of its class as Python literals: "alibi(shift=6)". Their
    values are checked when it is created.

    "package.module:Class" is a bias of your own, a subclass of `Bias` that is constructed with
    num_heads, and with dim and head_dim if it requires them.

    Raises ValueError for other names and arguments, and TypeError for other types.
    """
    if isinstance(scheme, Positions):
        return scheme
    if not isinstance(scheme, str):
        raise TypeError(f"positions is {scheme!r}; it must be a name or a Positions")
    name, values, options = parsed(scheme)
    if name == "window":
        if len(values) != 1 or options or type(values[0]) is not int or values[0] < 1:
            raise ValueError(f"positions is {scheme!r}; a window is like window(64)")
        return Positions(window=values[0])
    if name in BASELINES:
        _check_arguments(scheme, name, (), values, options)
        embedding = name if name in ("sinusoidal", "learned") else None
        return Positions(embedding=embedding, rotary=name == "rotary")
    if name in NAMED:
        kind = NAMED[name]
    elif ":" in name:
        kind = _imported(name)
    else:
        known = ", ".join((*BASELINES, "window(WIDTH)", "module:Class", *NAMED))
        raise ValueError(f"positions is {scheme!r}; it may be {known}")
    _check_arguments(scheme, name, options_of(kind), values, options)
    return Positions(bias=partial(make, kind, **options))


def split_names(text: str) -> list[str]:
    """The names of a comma-separated list, whose arguments may have commas too."""
    names, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            names.append("")
        else:
            names[-1] += character
    return [name.strip() for name in names]


def parsed(scheme: str) -> tuple[str, list[object], dict[str, object]]:
    """The name, and its positional and keyword arguments, which are literals: nothing is run."""
    called = CALL.fullmatch(scheme)
    if not called:
        return scheme, [], {}
    try:
        call = ast.parse(f"scheme({called[2]})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError("its parentheses do not match")
        values = [ast.literal_eval(value) for value in call.args]
        options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        if None in options or len(options) < len(call.keywords):
            raise ValueError("arguments are given by **, or twice")
    except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"positions is {scheme!r}; its arguments must be like shift=6, with literal values"
        ) from error
    return called[1], values, options


def _check_arguments(
    scheme: str, name: str, allowed: tuple[str, ...], values: list, options: dict
) -> None:
    """Raises ValueError for positional arguments, and keyword arguments that are not allowed."""
    unknown = [str(option) for option in options if option not in allowed]
    if values or unknown:
        wrong = ", ".join([*map(repr, values), *unknown])
        takes = f"the keyword arguments {', '.join(allowed)}" if allowed else "no arguments"
        raise ValueError(f"positions is {scheme!r} with {wrong}; {name} takes {takes}")


def _imported(path: str) -> type[Bias]:
    """The class `path`, "package.module:Class"."""
    module, _, name = path.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"positions is {path!r}; it must be a class: {error}") from error
    if not isinstance(made, type) or not issubclass(made, Bias):
        raise ValueError(f"positions is {path!r}; it must be a subclass of biases.Bias")
    return made
