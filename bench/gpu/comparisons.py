"""The comparisons of the GPU benchmark: our calls and the baselines for each case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.nn.attention import SDPBackend

from bench.common.implementations import ours, plain_pytorch
from bench.common.layer import Inputs, Training
from bench.gpu.baselines import flex, sdpa, sdpa_dense

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward+backward"
FLASH = "SDPA's FlashAttention-2"
SDPA = {
    FLASH: SDPBackend.FLASH_ATTENTION,
    "SDPA's cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA's efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# The biases, and their names with trained parameters. For biases of hidden states these are the
# steps, as in the alternatives; Sandwich has none.
TRAINED = {
    "alibi": "alibi, trained",
    "kerple_log": "kerple_log",
    "sandwich": None,
    "t5": "t5",
    "cable": "cable, given steps",
    "forget_gate": "forget_gate, given steps",
}
SHIPPED_FIXED = ("alibi", "sandwich")
NONE = "none"
# ALiBi with the default tolerance; elsewhere every visible pair is computed.
SKIPPING = "alibi, skipping"
DECODING = "decoding"  # with and without a bias, in decoding.py


TRITON, CUDA = "triton", "cuda"
KERNELS = {TRITON: "Triton kernels", CUDA: "CUDA kernels"}


@dataclass(frozen=True)
class Case:
    """A bias, NONE, SKIPPING or DECODING, at one size, and the backend whose kernels are measured.
    All cases are causal and in bfloat16."""

    bias: str
    head_dim: int
    length: int
    backend: str = TRITON

    @property
    def size(self) -> str:
        return f"{KERNELS[self.backend]}, D = {self.head_dim}, N = {self.length}"

    def __str__(self) -> str:
        return f"{self.size}: {self.bias}"


@dataclass(frozen=True)
class Aim:
    """A target that several comparisons share."""

    name: str
    comparison: str
    target: float


@dataclass(frozen=True)
class Comparison:
    """A comparison of one of our calls with an alternative."""

    mode: str
    bias: str | None  # ours, a name for make_bias
    other: str
    make_other: Callable[[Inputs], Training]
    aim: Aim | None = None
    same: bool = True  # whether the alternative computes the same result
    matrices: bool = False  # whether it needs N x N memory
    tolerance: float | None = 0.0  # of our call

    def work(self, case: Case) -> str:
        bias = self.bias or "no bias"
        if self.tolerance is None:
            bias += ", keys skipped,"
        return f"{case.size}, {self.mode}: {bias} against {self.other}"


def comparisons(case: Case, compiled: Callable) -> list[Comparison]:
    if case.bias == NONE:
        return without_bias(case, compiled)
    if case.bias == SKIPPING:
        return with_skipping(case, compiled)
    fixed, trained = f"{case.bias}, fixed", TRAINED[case.bias]
    as_shipped = fixed if case.bias in SHIPPED_FIXED else trained
    no_bias = partial(ours, bias=None, backend=case.backend)
    flex_fixed = partial(flex, bias=fixed, compiled=compiled)
    found = [
        Comparison(FORWARD, fixed, "no bias", no_bias, cost(case.bias, FORWARD, 1.04), same=False),
        Comparison(BOTH, as_shipped, "no bias", no_bias, cost(case.bias, BOTH, 1.06), same=False),
        Comparison(FORWARD, fixed, "FlexAttention", flex_fixed, over_flex("fixed", FORWARD, 1.1)),
        Comparison(BOTH, fixed, "FlexAttention", flex_fixed, over_flex("fixed", BOTH, 1.2)),
    ]
    if trained:
        aim = over_flex("trained table", BOTH, 3) if case.bias in ("kerple_log", "t5") else None
        flex_trained = partial(flex, bias=trained, compiled=compiled)
        found.append(Comparison(BOTH, trained, "FlexAttention", flex_trained, aim))
    flash = partial(sdpa, backend=SDPA[FLASH])
    for mode, bias in ((FORWARD, fixed), (BACKWARD, as_shipped)):
        if aim := over_flash(case, mode):
            found.append(Comparison(mode, bias, f"{FLASH} without bias", flash, aim, same=False))
    if case.backend == CUDA:
        found += against_triton({FORWARD: fixed, BOTH: as_shipped})
    elif case.bias == "kerple_log":
        found += against_matrices(case.bias)
    return found


def without_bias(case: Case, compiled: Callable) -> list[Comparison]:
    found = []
    for name, backend in SDPA.items():
        for mode in (FORWARD, BACKWARD):
            aim = over_flash(case, mode) if name == FLASH else None
            found.append(Comparison(mode, None, name, partial(sdpa, backend=backend), aim))
    flex_none = partial(flex, bias=None, compiled=compiled)
    for mode in (FORWARD, BOTH):
        found.append(Comparison(mode, None, "FlexAttention", flex_none))
    if case.backend == CUDA:
        found += against_triton({FORWARD: None, BACKWARD: None})
    return found


def against_triton(biases: dict[str, str | None]) -> list[Comparison]:
    """The biases of each mode, computed by the Triton kernels."""
    return [
        Comparison(mode, bias, "the Triton kernels", partial(ours, bias=bias, backend=TRITON))
        for mode, bias in biases.items()
    ]


def with_skipping(case: Case, compiled: Callable) -> list[Comparison]:
    bias, aim = "alibi, fixed", Aim(f"keys skipped, {BOTH}", ">=", 6)
    everything = partial(ours, bias=bias, backend=case.backend, tolerance=0.0)
    sides = [
        ("itself at tolerance 0", everything),
        ("FlexAttention", partial(flex, bias=bias, compiled=compiled)),
    ]
    return [Comparison(BOTH, bias, *side, aim, tolerance=None) for side in sides]


def against_matrices(bias: str) -> list[Comparison]:
    """Comparisons with alternatives that store the bias or all logits."""
    sides = [(bias, "plain PyTorch", partial(plain_pytorch, bias=bias))]
    for name in ("SDPA's efficient", "SDPA's cuDNN"):
        dense = partial(sdpa_dense, bias=bias, backend=SDPA[name])
        sides.append((f"{bias}, fixed", f"{name} with a dense bias", dense))
    return [Comparison(mode, *side, matrices=True) for side in sides for mode in (FORWARD, BOTH)]


def cost(bias: str, mode: str, target: float) -> Aim:
    if bias == "sandwich":
        return Aim(f"sandwich against no bias, {mode}", "<=", 1.35)
    return Aim(f"a bias against no bias, {mode}", "<=", target)


def over_flash(case: Case, mode: str) -> Aim | None:
    if case.head_dim != 128 or case.length < 8192:
        return None
    ours = {NONE: "no bias", "sandwich": "sandwich"}.get(case.bias, "a bias")
    name = f"{ours} against {FLASH} without bias, {mode}, D = 128, N >= 8192"
    return Aim(name, ">=", 1.1 if mode == FORWARD else 1.0)


def over_flex(what: str, mode: str, target: float) -> Aim:
    return Aim(f"against FlexAttention, {what}, {mode}", ">=", target)


MEMORY = Aim("memory of a bias against no bias, forward+backward", "<=", 1.05)
