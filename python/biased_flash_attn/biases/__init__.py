"""The biases: one file per family, with its parameters, its formula and its paper."""

from .alibi import ALiBi
from .banded import BandedRelative
from .base import Bias
from .cable import Cable, CableNW, KernelizedCable
from .cumulative import CumulativeBias
from .dense import DenseBias
from .disentangled import Disentangled
from .distance import DistanceBias
from .fire import FIRE, NormalizedBias
from .forget_gate import ForgetGate
from .gated_table import GatedTable
from .kerple import KerpleLog, KerplePower
from .of_heads import of_heads
from .relative import RelativeBias
from .sandwich import Sandwich, SmoothedSandwich
from .series import InverseDistance, InverseLogDistance, Type1, Type2
from .shaw import Shaw
from .tables import T5, ClippedTable
from .transformer_xl import TransformerXL

# Functions of the distance, constructed with num_heads.
DISTANCE_BIASES = {
    "alibi": ALiBi,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "sandwich": Sandwich,
    "smoothed_sandwich": SmoothedSandwich,
    "type1": Type1,
    "type2": Type2,
    "inverse_distance": InverseDistance,
    "inverse_log_distance": InverseLogDistance,
    "t5": T5,
    "clipped_table": ClippedTable,
}

# Functions of the positions, constructed with num_heads.
POSITION_BIASES = DISTANCE_BIASES | {"fire": FIRE}

# Constructed with dim and num_heads, then called on hidden states (B, N, dim).
CONTEXT_BIASES = {
    "cable": Cable,
    "cable_nw": CableNW,
    "kernelized_cable": KernelizedCable,
    "forget_gate": ForgetGate,
}

# Constructed with num_heads and dim or head_dim: their values depend on the content of the query,
# and not only on what is between it and a key.
QUERY_BIASES = {
    "banded_relative": BandedRelative,
    "shaw": Shaw,
    "transformer_xl": TransformerXL,
    "disentangled": Disentangled,
    "gated_table": GatedTable,
}

NAMED = POSITION_BIASES | CONTEXT_BIASES | QUERY_BIASES

__all__ = [
    "CONTEXT_BIASES",
    "DISTANCE_BIASES",
    "FIRE",
    "NAMED",
    "POSITION_BIASES",
    "QUERY_BIASES",
    "T5",
    "ALiBi",
    "BandedRelative",
    "Bias",
    "Cable",
    "CableNW",
    "ClippedTable",
    "CumulativeBias",
    "DenseBias",
    "Disentangled",
    "DistanceBias",
    "ForgetGate",
    "GatedTable",
    "InverseDistance",
    "InverseLogDistance",
    "KernelizedCable",
    "KerpleLog",
    "KerplePower",
    "NormalizedBias",
    "RelativeBias",
    "Sandwich",
    "Shaw",
    "SmoothedSandwich",
    "TransformerXL",
    "Type1",
    "Type2",
    "of_heads",
]
