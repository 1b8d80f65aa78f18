"""Compiles the Triton kernels as they are launched, for GPUs that need not be present.

    python -m bench.machine_code.compiled 90 64 128

prints one JSON object per line for every kernel of `tasks`, with the configuration that ships for
the GPU: registers, bytes of stack, shared memory, and instructions of loops. The arguments after
the architecture are values of head_dim, by default all of them. With "-" instead, tasks are read
from standard input, one JSON list per line. Nothing is run.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import NamedTuple

import torch
import triton
from biased_flash_attn.triton_kernels import launch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from biased_flash_attn.decoding.key_bounds import KeyBounds
from biased_flash_attn.forms import Form, Geometry, from_tensors
from biased_flash_attn.problem import Pages, Problem, TileBounds
from biased_flash_attn.sequences import Sequences
from biased_flash_attn.shared_constants import NEAR_KEYS, PLAN_QUERIES

from .hazards import overwrites
from .sass import Instruction, disassemble, tool

FORMS = (
    "none",
    "linear",
    "distance",
    "cumulative",
    "cumulative-gain",
    "log1p_square-gain",
    "dense",
    "normalized",
    "relative",
    "relative_last",
)
# Forms with separate block sizes where plans or ranges of rows take registers.
BIASES = ("linear", "distance", "cumulative-gain")
# Problems that compile to other kernels, and their forms. Strided: rows of v and grad_o have twice
# the stride of those of q and k. Far: rows of a head span 2^31 elements.
VARIANTS = {
    "noncausal": FORMS,
    "window": FORMS,
    "plan": BIASES,
    "packed": ("none", "dense", "normalized", "relative", *BIASES),
    "packed-plan": BIASES,
    "strided": BIASES,
    "far": ("none", "cumulative", *BIASES),
}
# The ranks of the vectors of queries and of keys, and the number of distances: a band of Inkling's
# rank; both terms of DeBERTa's, where all distances count.
VECTORS = {"relative": (16, 0, 1024), "relative_last": (64, 64, 512)}
# Keys per page, and query heads that share a key head in decoding.
PAGE_SIZE, GROUP = 64, 4
SUMS = ("linear", "cumulative")  # forms whose kernels differ between float16 and bfloat16

WIDTHS = (64, 128, 256)
BACKWARD = ("attn_bwd_dq_kernel", "attn_bwd_dkv_kernel")


class Task(NamedTuple):
    """A kernel of a problem.

    form: a form, possibly with a variant. bias_gradient: whether the bias is trained.
    """

    form: str
    dtype: str
    head_dim: int
    bias_gradient: bool
    kernel: str


@dataclass(frozen=True)
class Compiled:
    """The properties of a compiled kernel."""

    kernel: str
    form: str
    dtype: str
    head_dim: int
    bias_gradient: bool
    registers: int
    stack: int
    shared: int
    instructions: float  # per pair of query and key, in the loop with the fewest
    most_instructions: float  # in the loop with the most: within a band, at the edge of a mask
    spills: int  # instructions of all loops that move registers to memory or back
    stores: int  # those that move registers to memory among them
    matrix: int  # matrix instructions in all loops
    warpgroup: int  # those of Hopper's warp groups among them
    blocks: list[tuple[int, int]]  # rows and columns of the accumulators of Blackwell
    overwrites: list[str]  # instructions that write registers of a product in flight; see hazards


class Processor:
    """A driver for an absent GPU, which provides its architecture only."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        # Triton caches compiled kernels by device and ignores the target.
        return self.arch

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compiled(
    form: str,
    dtype: torch.dtype,
    head_dim: int,
    bias_gradient: bool = True,
    kernels: Collection[str] | None = None,
) -> Iterator[Compiled]:
    """The compiled forward and backward kernels of a causal problem, optionally only `kernels`."""
    name = str(dtype).removeprefix("torch.")
    for kernel, binary in binaries(form, dtype, head_dim, bias_gradient, kernels):
        yield Compiled(kernel, form, name, head_dim, bias_gradient, **facts(binary))


def binaries(
    form: str,
    dtype: torch.dtype,
    head_dim: int,
    bias_gradient: bool = True,
    kernels: Collection[str] | None = None,
) -> list[tuple[str, CompiledKernel]]:
    """The names of the kernels of a problem, and the results of their compilation."""
    made, started = [], set()

    def compile_only(kernel, *args, warmup, **kwargs):
        started.add(kernel.__name__)
        if kernels is None or kernel.__name__ in kernels:
            made.append((kernel.__name__, run(kernel, *args, warmup=True, **kwargs)))

    run = JITFunction.run
    JITFunction.run = compile_only
    try:
        attend(form, dtype, head_dim, bias_gradient)
    finally:
        JITFunction.run = run
    if started != set(launched(form, dtype, head_dim, bias_gradient)):
        raise RuntimeError(f"`launched` is wrong for {form}, which launches {sorted(started)}")
    return made


def attend(form: str, dtype: torch.dtype, head_dim: int, bias_gradient: bool) -> None:
    """Launches the forward and backward kernels of a causal problem of a form or variant."""
    form, *words = form.split("-")
    batch, heads, n = 1, 16, 4096
    longest = n // 2 if "packed" in words else n
    causal, window = "noncausal" not in words, 1000 if "window" in words else None
    distances = longest if causal else 2 * longest - 1

    def rows(row_stride: int) -> torch.Tensor:
        strides = n * row_stride, head_dim, row_stride, 1
        return torch.empty_strided((batch, heads, n, head_dim), strides, dtype=dtype)

    # Memory is allocated when it is written, and nothing is written.
    row_stride = 2**31 // n if "far" in words else heads * head_dim
    q, k, v, grad_o = (rows(row_stride) for _ in range(4))
    if "strided" in words:
        v, grad_o = rows(2 * row_stride), rows(2 * row_stride)
    plan, sequences, tensors = None, None, []
    if "packed" in words:
        ranges = [[0, longest, 0, longest, 0], [longest, longest, longest, longest, 0]]
        sequences = Sequences(torch.tensor(ranges), longest, longest, n, n, is_packed=True)
    if "plan" in words:
        entries = batch if sequences is None else len(sequences.rows)
        plan = torch.empty(2, entries, heads, longest // PLAN_QUERIES, dtype=torch.int32)
    if form == "linear":
        tensors = [torch.empty(1, heads)]
    elif form == "distance":
        tensors = [torch.empty(1, heads, distances)]
    elif form == "normalized":
        sizes = (1, distances), (1, n), (1, 32), (heads, 33), (heads, 33)
        tensors = [torch.empty(1, *size) for size in sizes]
    elif form == "dense":
        tensors = [torch.empty(1, heads, n, n)]
    elif form.startswith("relative"):
        *ranks, columns = VECTORS[form]
        tensors = []
        for r in ranks:
            tensors += [torch.empty(1, heads, n, r), torch.empty(1, heads, r, columns)]
    elif form != "none":
        gain = [torch.empty(batch, heads, n)] if "gain" in words else []
        tensors = [torch.empty(batch, heads, n).double(), *gain]
    lowered, geometry = (
        from_tensors(form, tensors),
        Geometry(longest, longest, causal, window, sequences),
    )
    problem = Problem(q, k, v, lowered, geometry, head_dim**-0.5, 0.0, "triton", plan)
    o, lse, *softmax = launch.forward(problem)
    launch.backward(problem, o, *softmax, grad_o, lse, bias_gradient)
    if lowered.may_skip and sequences is None:
        everything = torch.empty(2, batch, heads, n // PLAN_QUERIES, dtype=torch.int32)
        launch.trim(replace(problem, plan=everything), lse, 1e-6, NEAR_KEYS, False)
    if words in ([], ["gain"]):
        decode(q[:, :, :1], lowered)


def decode(q: torch.Tensor, form: Form) -> None:
    """Launches a decoding step: one query, and 64 pages of keys."""
    heads, pages = q.shape[1], 64
    k, v = (q.new_empty(pages, heads // GROUP, PAGE_SIZE, q.shape[3]) for _ in range(2))
    if form.per_token or form.per_pair:
        form = form.for_queries(slice(0, 1))
    if form.state is not None:
        form = form.with_state(form.state.view(pages, heads, PAGE_SIZE, *form.state.shape[3:]))
    block_table, lengths = torch.empty(1, pages).int(), torch.empty(1).long()
    bounds = TileBounds(*KeyBounds(pages, k, form.state).tensors(), *form.extremes(PAGE_SIZE))
    where = Pages(block_table, lengths, bounds)
    launch.append(k, q, block_table, lengths)
    problem = Problem(
        q, k, v, form, Geometry(1, PAGE_SIZE * pages), q.shape[3] ** -0.5, 1e-6, "triton"
    )
    launch.decode(problem.over_pages(k, v, form, where))


@functools.cache
def facts(binary) -> dict:
    """The fields of `Compiled` for a binary; forms that share a kernel share the object."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = tool("cuobjdump", "-res-usage", file.name)
    code = disassemble(binary.asm["cubin"])
    loops = [code.body(loop) for loop in code.loops]
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    memory = r"tensor_memory_encoding<blockM = (\d+), blockN = (\d+)"
    blocks = re.findall(memory, binary.asm["ttgir"])
    # Each pair has one exponential.
    over_pairs = [loop for loop in loops if count(loop, r"MUFU\.EX2")]
    a_pair = [len(loop) / count(loop, r"MUFU\.EX2") for loop in over_pairs]
    return {
        "registers": registers,
        "stack": stack,
        "shared": binary.metadata.shared,
        "instructions": min(a_pair, default=0.0),
        "most_instructions": max(a_pair, default=0.0),
        "spills": sum(count(loop, "LDL|STL") for loop in loops),
        "stores": sum(count(loop, "STL") for loop in loops),
        "matrix": sum(count(loop, r"\w*MMA") for loop in loops),
        "warpgroup": sum(count(loop, "HGMMA") for loop in loops),
        "blocks": [(int(rows), int(columns)) for rows, columns in set(blocks)],
        "overwrites": [f"{one.opcode} {one.operands}" for one in overwrites(code)],
    }


def count(instructions: Iterable[Instruction], name: str) -> int:
    return sum(bool(re.match(rf"({name})(\.|$)", one.opcode)) for one in instructions)


def problems() -> Iterator[tuple]:
    """The arguments of `compiled` without head_dim: every form, and variants that differ in one
    way. Variants are not combined, except for packed plans, and have no float32."""
    for name in (*FORMS, *(f"{form}-{x}" for x, forms in VARIANTS.items() for form in forms)):
        yield name, torch.bfloat16, True, None
        yield name, torch.bfloat16, False, BACKWARD
        if name.startswith(SUMS):
            yield name, torch.float16, True, ("attn_fwd_kernel", *BACKWARD)
    for name in FORMS:
        yield name, torch.float32, True, None


def tasks(widths: Iterable[int] = WIDTHS) -> Iterator[Task]:
    """Every kernel of every problem."""
    for width in widths:
        for form, dtype, bias_gradient, kernels in problems():
            for kernel in launched(form, dtype, width, bias_gradient):
                if kernels is None or kernel in kernels:
                    name = str(dtype).removeprefix("torch.")
                    yield Task(form, name, width, bias_gradient, kernel)


def launched(form: str, dtype: torch.dtype, head_dim: int, bias_gradient: bool) -> list[str]:
    """The kernels that `attend` launches."""
    form, *words = form.split("-")
    names = ["attn_fwd_kernel", "attn_bwd_delta_kernel", *BACKWARD]
    if form in ("distance", "normalized") and bias_gradient:
        names.append("attn_bwd_table_kernel")
    if form.startswith("relative") and bias_gradient:
        names.append("attn_bwd_relative_kernel")
    may_skip = form not in ("none", "dense")
    if may_skip and "packed" not in words:
        names.append("attn_trim_kernel")
    if words in ([], ["gain"]):
        names += ["attn_append_kernel", "attn_decode_kernel", "attn_decode_merge_kernel"]
        # Products in float32 leave no room for pieces or, of wide heads, for vectors of keys.
        is_large = form == "normalized" or (form == "relative_last" and head_dim > 64)
        chooses = may_skip and not (dtype == torch.float32 and is_large)
        names += ["attn_choose_kernel"] if chooses else []
    if dtype != torch.float32 and head_dim <= 128:
        if form == "distance":
            names.append("table_factors_kernel")
        elif form in ("linear", "cumulative"):
            names += ["query_factors_kernel", "key_factors_kernel"]
    return names


def main(arch: str, *widths: str) -> None:
    driver.set_active(Processor(int(arch)))
    made_for = {"arch": int(arch), "triton": triton.__version__}
    given = (Task(*json.loads(line)) for line in sys.stdin)
    kernels = defaultdict(set)
    for *problem, kernel in given if widths == ("-",) else tasks(map(int, widths or WIDTHS)):
        kernels[tuple(problem)].add(kernel)
    for (form, dtype, width, bias_gradient), names in kernels.items():
        for one in compiled(form, getattr(torch, dtype), width, bias_gradient, names):
            print(json.dumps({**made_for, **asdict(one)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
