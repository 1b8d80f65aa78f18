"""The forms that biases are lowered to: the only description of a bias that kernels receive."""

from ..geometry import Geometry
from .base import Form, StateBounds, names, of_tensors
from .cumulative import Cumulative
from .dense import Dense
from .distance import Distance
from .linear import Linear
from .none import NoBias
from .normalized import Normalized
from .relative import Relative
from .tail_mass import KeySide, TailMass

__all__ = [
    "Cumulative",
    "Dense",
    "Distance",
    "Form",
    "Geometry",
    "KeySide",
    "Linear",
    "NoBias",
    "Normalized",
    "Relative",
    "StateBounds",
    "TailMass",
    "names",
    "of_tensors",
]
