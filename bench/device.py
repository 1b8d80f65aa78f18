"""What the GPU benchmark asks of a device, and its sizes there."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 256 * 2**20  # several times the cache
HEAD_START_CYCLES = 10_000_000  # about 5 ms


class Gpu:
    """The GPU that torch uses."""

    name = "cuda"
    hidden = 2048  # heads times head_dim
    tokens = 16384  # of a batch
    # Several tiles, the last one partial; a multiple of 16, as the lengths that are timed are, so
    # that the very kernels that are timed are checked.
    checked_length = 336
    decoding_heads = 32, 8  # of queries, and of keys
    decoding_batches = 1, 32
    decoding_length = 32768
    rounds = 11
    least_rounds = 3
    seconds_a_comparison = 1.0

    flushing: torch.Tensor | None = None

    def compiled(self, function: Callable) -> Callable:
        return torch.compile(function, dynamic=False, fullgraph=True)

    def seconds(self, call: Callable) -> float:
        """What the GPU needs for a call, with nothing of it in the cache before."""
        if self.flushing is None:
            self.flushing = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.flushing.zero_()
        # Meanwhile the host gets ahead, so that the GPU never waits for a launch.
        torch.cuda._sleep(HEAD_START_CYCLES)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def peak_bytes(self, call: Callable) -> int:
        """The most memory that a call takes, its results included."""
        self.release()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before

    def release(self) -> None:
        """Waits for the GPU, then gives unused memory to other processes."""
        torch.cuda.synchronize()
        self.flushing = None
        torch.cuda.empty_cache()


class Rehearsal(Gpu):
    """Goes through the same steps, interpreted and tiny. Its numbers mean nothing."""

    name = "cpu"
    hidden = 16
    tokens = 64
    checked_length = 24
    decoding_heads = 4, 2
    decoding_batches = 1, 2
    decoding_length = 100
    rounds = least_rounds = 1

    def compiled(self, function: Callable) -> Callable:
        return function

    def seconds(self, call: Callable) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def peak_bytes(self, call: Callable) -> int:
        call()
        return 1

    def release(self) -> None:
        pass
