"""The forms that biases are lowered to: the only description of a bias that kernels receive."""

from ..geometry import Geometry
from .base import Form, from_tensors, names
from .cumulative import Cumulative
from .dense import Dense
from .distance import Distance
from .linear import Linear
from .none import NoBias
from .normalized import Normalized
from .other_tokens import DecodableForm, DistributableForm
from .relative import Relative
from .skippable import SkippableForm, StateBounds
from .tail_mass import KeySide, TailMass

__all__ = [
    "Cumulative",
    "DecodableForm",
    "Dense",
    "Distance",
    "DistributableForm",
    "Form",
    "Geometry",
    "KeySide",
    "Linear",
    "NoBias",
    "Normalized",
    "Relative",
    "SkippableForm",
    "StateBounds",
    "TailMass",
    "from_tensors",
    "names",
]
