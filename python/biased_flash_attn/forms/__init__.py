"""The forms a bias is lowered to: what kernels, and all code in between, have to know of it."""

from ..geometry import Geometry
from .base import Form, Known, names, of_tensors
from .bounds import Mass, Side
from .cumulative import Cumulative
from .dense import Dense
from .distance import Distance
from .linear import Linear
from .none import NoBias

__all__ = [
    "Cumulative",
    "Dense",
    "Distance",
    "Form",
    "Geometry",
    "Known",
    "Linear",
    "Mass",
    "NoBias",
    "Side",
    "names",
    "of_tensors",
]
