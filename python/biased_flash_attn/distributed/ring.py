"""What ranks send one another: small things to all, keys and gradients to whom they matter."""

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
    """Counts what this rank sends in the calls that are given it, forward and backward.

    sent: bytes of keys, values, running sums of steps, gradients returned to the owning rank, and
    control messages: bounds of keys, and which keys each rank requests. A message to each of n
    ranks counts n times. hops and dropped_hops: how often keys of another rank were received, in
    either pass, and how often a mask would show keys of which none mattered.
    """

    sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    hops: int = 0
    dropped_hops: int = 0

    @property
    def total(self) -> int:
        return sum(self.sent.values())


class Ring:
    """The ranks of a group. At hop h, rank r is sent what it needs of r - h, and sends to r + h."""

    def __init__(self, group: dist.ProcessGroup | None, traffic: Traffic | None = None):
        self.group, self.traffic = group, traffic if traffic is not None else Traffic()
        self.rank, self.size = rank_and_size(group)

    def source(self, hop: int) -> int:
        return (self.rank - hop) % self.size

    def target(self, hop: int) -> int:
        return (self.rank + hop) % self.size

    def gather(self, x: Tensor, what: str) -> list[Tensor]:
        """x of every rank, all of one shape, for `what` an error names."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._count("control", x, self.size - 1)
        with naming_the_peers(f"rank {self.rank} exchanged {what} with ranks 0 to {self.size - 1}"):
            dist.all_gather(parts, x, group=self.group)
        return parts

    def begin(
        self,
        hop: int,
        outgoing: list[tuple[str, Tensor]],
        incoming: list[Tensor],
        *,
        home: bool = False,
    ) -> Messages:
        """Starts to send tensors, each with its kind, and to receive some; without rows nothing.

        They go on to the target and come from the source or, on the way home, the other way.
        """
        to, of = self.target(hop), self.source(hop)
        if home:
            to, of = of, to
        operations = []
        for kind, x in outgoing:
            if x.numel():
                self._count(kind, x, 1)
                operations.append(self._operation(dist.isend, x, to, 2 * hop + home))
        for x in incoming:
            if x.numel():
                operations.append(self._operation(dist.irecv, x, of, 2 * hop + home))
        direction = "sent gradients home" if home else "passed keys on"
        doing = f"rank {self.rank} {direction} in hop {hop} of {self.size - 1}, to {to} from {of}"
        with naming_the_peers(doing):
            works = dist.batch_isend_irecv(operations) if operations else []
        return Messages(works, doing, [x for _, x in outgoing])

    def _operation(self, operation, x: Tensor, peer: int, tag: int) -> dist.P2POp:
        group = dist.group.WORLD if self.group is None else self.group
        return dist.P2POp(operation, x, dist.get_global_rank(group, peer), group, tag)

    def _count(self, kind: str, x: Tensor, times: int) -> None:
        self.traffic.sent[kind] += times * x.numel() * x.element_size()


@dataclass
class Messages:
    """Those of a hop, on their way. What is sent stays alive until they have arrived."""

    works: list[dist.Work]
    doing: str
    outgoing: list[Tensor]

    def wait(self) -> None:
        with naming_the_peers(self.doing):
            for work in self.works:
                work.wait()
        self.outgoing.clear()


@contextlib.contextmanager
def naming_the_peers(doing: str) -> Iterator[None]:
    """Errors of the transport say nothing of who was waited for, and what for."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"context_parallel_attention: a peer was lost while {doing}. It may have ended, or not"
            " have called as often as the others; look at its own error, and start all ranks anew"
            f" from a checkpoint. The transport said: {error}"
        ) from error
