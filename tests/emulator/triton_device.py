"""A Triton device on the CPU: kernels are compiled as for a GPU, and their PTX is emulated."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from biased_flash_attn.shared_memory import block_bytes

from .execution import Counts, launch
from .parser import Kernel, parse
from .tensor_map import TF32, TensorMap

TENSOR_MAP_BYTES = 128
MAX_PARSED = 32


class Device:
    """Replaces Triton's driver of a GPU, and executes the kernels that are launched on it."""

    def __init__(self, arch: int, seed: int = 0, approximation_seed: int = 0):
        self.arch = arch
        self.seed = seed
        self.approximation_seed = approximation_seed
        self.launches: Counter[str] = Counter()
        self.instructions = 0
        self.executed: set[str] = set()  # hashes of kernels
        self._parsed: OrderedDict[str, Kernel] = OrderedDict()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        # Triton caches compiled kernels by the number of the device.
        return self.arch

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def run(self, compiled, grid: tuple[int, ...], arguments: dict) -> Counts:
        """Executes a kernel that Triton compiled, with its arguments by name.

        Raises OutOfResources, as a GPU's driver does, if a block needs too much shared memory.
        """
        shared, most = compiled.metadata.shared, block_bytes(self.arch)
        if shared > most:
            raise OutOfResources(shared, most, "shared memory")
        kernel = self.parsed(compiled)
        self.executed.add(compiled.hash)
        values = []
        descriptors = iter(compiled.metadata.tensordesc_meta or ())
        for name, type_ in compiled.src.signature.items():
            if type_ != "constexpr":  # those may be missing, as they have defaults
                values += leaves(type_, arguments[name], descriptors)
        programs = grid[0] * grid[1] * grid[2]
        # Pointers to scratch memory follow a kernel's own arguments.
        scratch = aligned_bytes(compiled.metadata.global_scratch_size * programs)
        values += [scratch] * (len(kernel.parameters) - len(values))
        counts = launch(
            kernel,
            grid,
            values,
            shared_bytes=shared,
            seed=self.seed,
            approximation_seed=self.approximation_seed,
        )
        self.launches[kernel.name] += 1
        self.instructions += counts.instructions
        return counts

    def parsed(self, compiled) -> Kernel:
        """The parsed kernel; caches the latest ones, and drops all stages of compilation but PTX.

        The stages and the parsed form of a kernel take megabytes, and a test suite has thousands.
        """
        if compiled.hash in self._parsed:
            self._parsed.move_to_end(compiled.hash)
            return self._parsed[compiled.hash]
        ptx = compiled.asm["ptx"]
        compiled.asm.clear()
        compiled.asm["ptx"] = ptx
        (kernel,) = parse(ptx).kernels.values()
        self._parsed[compiled.hash] = kernel
        if len(self._parsed) > MAX_PARSED:
            self._parsed.popitem(last=False)
        return kernel


def aligned_bytes(size: int) -> torch.Tensor:
    """Memory with the alignment of tensor maps."""
    padded = torch.empty(size + TENSOR_MAP_BYTES, dtype=torch.uint8)
    return padded[-padded.data_ptr() % TENSOR_MAP_BYTES :][:size]


def leaves(type_, value, descriptors: Iterator) -> list:
    """The values that are passed to the compiled kernel for an argument.

    descriptors: the compiler's choices for each tensor descriptor; empty if the architecture has no
    tensor maps.
    """
    if type_ == "constexpr":
        return []
    if isinstance(type_, (tuple, list)):
        pairs = zip(type_, value, strict=True)
        return [leaf for t, v in pairs for leaf in leaves(t, v, descriptors)]
    if isinstance(type_, str) and type_.startswith("tensordesc"):
        return of_descriptor(value, next(descriptors, None))
    return [value]


def of_descriptor(descriptor: TensorDescriptor, chosen: dict | None) -> list:
    """The arguments that represent a tensor descriptor."""
    sizes = [*descriptor.shape, *descriptor.strides]
    if chosen is None:
        options = descriptor.padding == "nan", descriptor.round_f32_to_tf32
        return [descriptor.base, *sizes, *options, *sizes]
    tensor_map = TensorMap(
        descriptor.base.as_strided(descriptor.shape, descriptor.strides),
        chosen["block_size"],
        swizzle=(0, 32, 64, 128)[chosen["swizzle"]],
        fill=descriptor.padding,
        element=TF32 if descriptor.round_f32_to_tf32 else chosen["elem_type"],
    )
    return [tensor_map, *sizes]


@contextlib.contextmanager
def installed(device: Device) -> Iterator[Device]:
    """Within the context, the device executes Triton's launches on CPU tensors.

    Kernels are not assembled to machine code, and so have a separate cache.
    """
    before = driver._active
    compile_and_launch, assemble = JITFunction.run, CUDABackend.make_cubin
    cache = triton.knobs.cache.dir

    def compile_and_execute(self, *args, grid, warmup, **kwargs):
        compiled = compile_and_launch(self, *args, grid=grid, warmup=True, **kwargs)
        if not warmup:
            arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
            sizes = grid(arguments) if callable(grid) else grid
            device.run(compiled, (*sizes, 1, 1)[:3], arguments)
        return compiled

    driver.set_active(device)
    JITFunction.run = compile_and_execute
    CUDABackend.make_cubin = lambda *_: b""
    triton.knobs.cache.dir = f"{cache}/emulated"
    try:
        yield device
    finally:
        JITFunction.run, CUDABackend.make_cubin = compile_and_launch, assemble
        triton.knobs.cache.dir = cache
        driver._active = before


def triton_device(arch: int, seed: int = 0):
    """`installed` for a new device of an architecture, as a context manager."""
    return installed(Device(arch, seed))
