"""The devices of the GPU benchmark, with the sizes of its problems."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from biased_flash_attn import backends
from biased_flash_attn.cli.clock import GpuClock
from biased_flash_attn.cuda_kernels import nvrtc
from biased_flash_attn.cuda_kernels.launch import Launcher


class Gpu(GpuClock):
    """The GPU that torch uses."""

    name = "cuda"
    hidden = 2048  # heads times head_dim
    tokens = 16384  # of a batch
    # Several tiles, the last one partial; a multiple of 16 like the timed lengths, so that the same
    # kernels are checked.
    checked_length = 336
    decoding_heads = 32, 8  # of queries, and of keys
    decoding_batches = 1, 32
    decoding_length = 32768
    rounds = 11
    least_rounds = 3
    seconds_per_comparison = 1.0

    def used(self) -> AbstractContextManager:
        """A context in which the kernels run on this device."""
        return nullcontext()

    def refusal(self) -> str:
        """The reason why the CUDA kernels cannot run on this device, or an empty string."""
        report = backends.get("cuda").report()
        return "" if report.available else report.detail

    def compiled(self, function: Callable) -> Callable:
        return torch.compile(function, dynamic=False, fullgraph=True)

    def peak_bytes(self, call: Callable) -> int:
        """The peak memory of a call, including its results."""
        self.release()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before


class Rehearsal(Gpu):
    """The same steps with tiny problems on an emulated GPU; its times are meaningless."""

    name = "cpu"
    hidden = 16
    tokens = 64
    checked_length = 24
    decoding_heads = 4, 2
    decoding_batches = 1, 2
    decoding_length = 100
    rounds = least_rounds = 1

    def used(self) -> AbstractContextManager:
        from tests.emulator import cuda_backend, triton_backend
        from tests.emulator.cuda_driver import EmulatedDriver
        from tests.emulator.triton_device import Device

        stack = ExitStack()
        stack.enter_context(triton_backend.emulated(Device(arch=90)))
        stack.enter_context(cuda_backend.emulated(Launcher(EmulatedDriver())))
        return stack

    def refusal(self) -> str:
        return nvrtc.missing()

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
