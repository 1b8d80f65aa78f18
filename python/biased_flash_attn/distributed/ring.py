"""Communication between ranks: all-gather of small tensors, point-to-point of keys and
gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from .layout import rank_and_size

KINDS = ("keys", "values", "sums", "gradients", "control")


@dataclass
class Traffic:
    """Counts the bytes that this rank sends in the calls it is passed to, forward and backward.

    sent: bytes of keys, values, prefix sums, gradients returned to the owning rank, and control
    messages (summaries of keys, and requests for keys). A message to each of n ranks counts n
    times. hops: the number of times that keys of another rank were received, in either pass.
    dropped_hops: the number of times that keys were visible by the mask but none had to be sent.
    """

    sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    hops: int = 0
    dropped_hops: int = 0

    @property
    def total(self) -> int:
        return sum(self.sent.values())


class Ring:
    """The ranks of a group. At hop h, rank r receives the keys it needs from r - h, and sends to r
    + h."""

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic | None = None):
        self.group, self.traffic = group, traffic if traffic is not None else Traffic()
        self.rank, self.size = rank_and_size(group)

    def source(self, hop: int) -> int:
        return (self.rank - hop) % self.size

    def target(self, hop: int) -> int:
        return (self.rank + hop) % self.size

    def gather(self, x: Tensor, what: str) -> list[Tensor]:
        """Returns x of every rank; shapes must be equal. `what` describes x in error messages."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._count("control", x, self.size - 1)
        with reraise_with_peers(
            f"rank {self.rank} exchanged {what} with ranks 0 to {self.size - 1}"
        ):
            dist.all_gather(parts, x, group=self.group)
        return parts

    def begin(
        self,
        hop: int,
        outgoing: list[tuple[str, Tensor]],
        incoming: list[Tensor],
        *,
        returning: bool = False,
    ) -> Messages:
        """Starts sending tensors, each with its kind, and receiving others; empty tensors are
        skipped.

        Tensors are sent to the target and received from the source of the hop or, with `returning`,
        in the opposite direction.
        """
        to, of = self.target(hop), self.source(hop)
        if returning:
            to, of = of, to
        operations = []
        for kind, x in outgoing:
            if x.numel():
                self._count(kind, x, 1)
                operations.append(self._operation(dist.isend, x, to, 2 * hop + returning))
        for x in incoming:
            if x.numel():
                operations.append(self._operation(dist.irecv, x, of, 2 * hop + returning))
        direction = "returned gradients" if returning else "sent keys"
        doing = f"rank {self.rank} {direction} in hop {hop} of {self.size - 1}, to {to} from {of}"
        with reraise_with_peers(doing):
            works = dist.batch_isend_irecv(operations) if operations else []
        return Messages(works, doing, [x for _, x in outgoing])

    def _operation(self, operation, x: Tensor, peer: int, tag: int) -> dist.P2POp:
        group = dist.group.WORLD if self.group is None else self.group
        return dist.P2POp(operation, x, dist.get_global_rank(group, peer), group, tag)

    def _count(self, kind: str, x: Tensor, times: int) -> None:
        self.traffic.sent[kind] += times * x.numel() * x.element_size()


@dataclass
class Messages:
    """The messages in flight of a hop. Sent tensors are kept alive until they have arrived."""

    works: list[dist.Work]
    doing: str
    outgoing: list[Tensor]

    def wait(self) -> None:
        with reraise_with_peers(self.doing):
            for work in self.works:
                work.wait()
        self.outgoing.clear()


@contextlib.contextmanager
def reraise_with_peers(doing: str) -> Iterator[None]:
    """Context manager: adds the peers and the operation to errors of the transport."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"context_parallel_attention: a peer was lost while {doing}. It may have exited, or"
            " made fewer calls than the others; check its own error, and restart all ranks from a"
            f" checkpoint. The transport reported: {error}"
        ) from error
