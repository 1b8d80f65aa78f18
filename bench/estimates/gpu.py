"""The rates of a GPU, from the vendor's documents and published microbenchmarks.

Rates are those of one multiprocessor. Each has four partitions with a scheduler, a quarter of the
arithmetic units and a quarter of the warps, which share shared memory and access to the L2 cache.
"""

from __future__ import annotations

from dataclasses import dataclass

PARTITIONS = 4


@dataclass(frozen=True)
class Gpu:
    """Multiprocessors, memory and peak rates are from NVIDIA's white papers on the A100 (2020) and
    the H100 (2022), the rates of arithmetic units from the CUDA C++ programming guide's table of
    arithmetic throughput, the rate of warp-level products on Hopper and the latencies of shared
    memory and of the L2 cache from microbenchmarks (Luo et al., arXiv:2402.13499; Chips and Cheese,
    "Nvidia's H100: Funny L2, and Tons of Bandwidth", 2023). Published measurements of the L2
    bandwidth differ by a factor of two; the values here are between them.

    `fence` and `sustained` are fitted by calibration.py.
    """

    name: str
    arch: int
    multiprocessors: int
    clock: float  # GHz at which the vendor states the peak rate
    products: int  # half-precision multiply-adds per cycle
    warp_products: float  # fraction of that rate that products of single warps (HMMA) reach
    fp32: int  # cycles that a warp's float32 instruction takes
    fp64: int
    shared_memory: int  # bytes that a multiprocessor has for blocks
    l2_bytes: int  # bytes per cycle that one multiprocessor reads while all others read
    hbm: float  # bytes per nanosecond of the whole GPU
    # Cycles of a fence between copies to shared memory and the products that read them. It is the
    # latency that Triton's loops expose most, as each pass has at least one fence.
    fence: int
    # Fraction of the simulated speed that is reached: the clock under load is lower than `clock`,
    # and the simulation omits instruction fetch, register banks and conflicts in the L2 cache.
    sustained: float
    registers: int = 65536
    max_warps: int = 64
    l2_latency: int = 270
    shared_latency: int = 30

    @property
    def peak(self) -> float:
        """The peak rate in half precision, in TFLOP/s."""
        return 2e-3 * self.products * self.multiprocessors * self.clock

    def nanoseconds(self, cycles: float) -> float:
        return cycles / (self.clock * self.sustained)


H100 = Gpu(
    name="H100 SXM",
    arch=90,
    multiprocessors=132,
    clock=1.83,
    products=2048,
    warp_products=0.63,
    fp32=1,
    fp64=2,
    shared_memory=228 * 1024,
    l2_bytes=40,
    hbm=3350,
    fence=250,
    sustained=0.78,
)
A100 = Gpu(
    name="A100 SXM, 40 GB",
    arch=80,
    multiprocessors=108,
    clock=1.41,
    products=1024,
    warp_products=1.0,
    fp32=2,
    fp64=4,
    shared_memory=164 * 1024,
    l2_bytes=32,
    hbm=1555,
    fence=0,
    sustained=0.95,
)
GPUS = {gpu.arch: gpu for gpu in (H100, A100)}
