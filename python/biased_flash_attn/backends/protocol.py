"""The backend protocol, which every backend implements.

Shapes: B batch, H heads, Hkv key heads, D and Dv channels of keys and values. A backend receives
only validated problems for which `refusal` returned an empty string, and need not have methods for
those that it always refuses. It raises ValueError for NaN in a form's tensors if it can detect them
without synchronizing with a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..problem import Problem

MAX_HEAD_DIM_ON_GPUS = 256

# The kinds of calls. A step of decoding appends to a cache, and attends to its pages; context
# parallelism consists of problems for pairs of chunks.
ATTENTION, DECODING, CONTEXT_PARALLELISM = "attention", "decoding", "context parallelism"


@dataclass(frozen=True)
class Report:
    """The line of a backend in `python -m biased_flash_attn info`."""

    name: str
    available: bool
    detail: str  # the hardware it runs on or, if unavailable, the reason and the remedy


class Backend(Protocol):
    """An implementation of attention.

    Attributes:
        name: its name in `backend=`.
        device_type: the device type of tensors for which it is the default; None if for none.
        has_kernels: whether it is a `KernelBackend`. Otherwise PyTorch differentiates `forward`,
            and every visible tile is computed.
        calls: the kinds of calls that it computes.
    """

    name: str
    device_type: str | None
    has_kernels: bool
    calls: frozenset[str]

    def report(self) -> Report:
        """Returns whether it can run on this machine, and on what hardware or why not."""

    def refusal(self, problem: Problem) -> str:
        """Returns the reason why it cannot compute a problem, or an empty string. The reason is
        phrased to follow the backend's name in an error message."""

    def forward(self, problem: Problem) -> tuple[Tensor, ...]:
        """Returns o (B, H, Nq, Dv) in q's dtype, in the layout of `sequences.empty_rows`, and lse
        (B, H, Nq), natural logarithm, in float32, or float64 for float64. A `KernelBackend` also
        returns pivot and log_sum, which are like lse: their sum is lse in base 2.

        Padding rows, and queries that attend to no key, have o = 0, lse = -inf and log_sum = -inf.
        """

    def decode(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Like `forward`, for a problem with pages and few queries. The last query has the position
        of the last key of its sequence. Keys may be skipped within the problem's tolerance."""

    def append(self, pages: Tensor, rows: Tensor, block_table: Tensor, lengths: Tensor) -> None:
        """Writes rows (B, heads, n, channels) or (B, heads, n) into pages (pages, heads, page_size,
        ...), as the last n of the lengths[b] keys of each sequence: see `problem.Pages`."""


class KernelBackend(Backend, Protocol):
    """A backend that runs as an opaque operator, and computes only the tiles of a problem's plan.
    Its problems have at least one sequence, query and key."""

    def backward(
        self,
        problem: Problem,
        o: Tensor,
        pivot: Tensor,
        log_sum: Tensor,
        grad_o: Tensor,
        grad_lse: Tensor,
        *,
        targets: list[int],
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
        """Returns the gradients of q, k and v, with their shapes and layouts, and a list of the
        gradients of the form's tensors, with their shapes.

        targets: the `forms.gradients` targets of the form's tensors; [] if their gradients are not
        requested. The list has None for gradients that have been added to those of q or k, which
        needs less memory.

        o, pivot and log_sum are results of `forward` for the same problem, or for a problem with
        additional keys. grad_o and grad_lse have their shapes, and any strides.
        """

    def trim(
        self, problem: Problem, near: Tensor, fraction: float, reach: int, from_end: bool
    ) -> Tensor:
        """Shortens the key ranges of the problem's plan, and returns their new ends if from_end,
        else their new beginnings, (B, H, tiles) int32.

        For each query, the exponentials of the logits of the removed keys sum to at most fraction *
        exp(near), and its `reach` nearest past keys are not removed. near (B, H, Nq) is a lower
        bound on lse; no key is removed where it is NaN.
        """


def too_wide(problem: Problem) -> str:
    """Returns why kernels for GPUs cannot compute a problem with this many channels, or an empty
    string: a tile of all channels must fit in shared memory."""
    for name, x in (("q", problem.q), ("v", problem.v)):
        if x.shape[3] > MAX_HEAD_DIM_ON_GPUS:
            return f"needs a head_dim of at most {MAX_HEAD_DIM_ON_GPUS}; {name} has {x.shape[3]}"
    return ""
