"""The kernels on tensors: what the backend calls."""

from ..processors import unsupported as unsupported
from .attention import backward as backward
from .attention import forward as forward
from .attention import trim as trim
from .decoding import append as append
from .decoding import decode as decode
