"""The backends, which compute attention or report why they cannot. See `protocol`."""

from .cpu import instruction_set, release_memory
from .protocol import CONTEXT_PARALLELISM, DECODING, Backend, KernelBackend, Report
from .registry import NAMES, RefusedError, choose, get, report

__all__ = [
    "CONTEXT_PARALLELISM",
    "DECODING",
    "NAMES",
    "Backend",
    "KernelBackend",
    "RefusedError",
    "Report",
    "choose",
    "get",
    "instruction_set",
    "release_memory",
    "report",
]
