"""What a backend is: the contract that reference, cpu and triton fulfil, and a new one has to.

Shapes: B batch, H heads, Hkv key heads, D and Dv channels of keys and values. A backend is handed
problems that `refusal` had nothing to say against, whose arguments have been checked. It raises
ValueError for NaN in a form's tensors where it can see them without waiting for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..problem import Problem


@dataclass(frozen=True)
class Report:
    """What `python -m biased_flash_attn info` shows of a backend."""

    name: str
    available: bool
    detail: str  # what it runs on or, where it is missing, why and what to do


class Backend(Protocol):
    """One way to compute problems.

    Attributes:
        name: what `backend=` calls it.
        device_type: of the tensors that it is chosen for; None where it is chosen for none.
        has_kernels: whether it is a `KernelBackend`. Where it is not, PyTorch differentiates
            `forward`, and every visible tile is computed.
    """

    name: str
    device_type: str | None
    has_kernels: bool

    def report(self) -> Report:
        """Whether it can run on this machine, on what, and why not."""

    def refusal(self, q: Tensor) -> str:
        """Why it cannot compute problems with tensors like q, to follow its name, or nothing."""

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """o (B, H, Nq, Dv) in q's dtype, laid out as `sequences.empty_rows` says, and lse
        (B, H, Nq), natural logarithm, in float32 or float64 for float64.

        Rows of padding, and queries that take no key, have o = 0 and lse = -inf.
        """

    def decode(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """The same as `forward`, of a problem with pages: a few queries, the last of which stands
        on the last key of its sequence. What its tolerance allows is left out."""

    def append(self, pages: Tensor, rows: Tensor, block_table: Tensor, lengths: Tensor) -> None:
        """Writes rows (B, heads, n, channels or nothing) into pages (pages, heads, page_size, ...),
        as the last of the `lengths` keys (B,) of each sequence: see `problem.Pages`."""


class KernelBackend(Backend, Protocol):
    """A backend that runs as an opaque operator and computes what a problem's plan leaves it."""

    def backward(
        self,
        problem: Problem,
        o: Tensor,
        lse: Tensor,
        grad_o: Tensor,
        grad_lse: Tensor,
        form_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """The gradients of q, k and v, shaped and laid out as these, and of the form's tensors,
        shaped as these, or [] without form_gradient.

        o and lse are what `forward` returned for the same problem, or those over more keys of which
        the problem has some. grad_o and grad_lse are shaped like them, with any strides.
        """

    def trim(
        self, problem: Problem, near: Tensor, fraction: float, reach: int, from_end: bool
    ) -> Tensor:
        """Where the ranges of the problem's plan end if from_end, else begin, with more left out:
        (B, H, tiles) int32.

        For each query the exponentials of the logits of what goes sum to fraction * exp(near) at
        most, and its `reach` nearest past keys stay. Nothing goes where near, (B, H, Nq) like lse,
        is NaN.
        """
