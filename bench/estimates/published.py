"""Timings published by others, to which the model is fitted and on which it is tested.

None of these kernels is ours. Each is represented by our kernel without a bias, compiled with the
same block sizes if they are known. It differs in how it scales logits, in the order in which it
starts blocks (which is taken into account), and in the version of Triton.
"""

from __future__ import annotations

from dataclasses import dataclass

from biased_flash_attn.triton_kernels.configs import Config

TOKAMAX = "Tokamax"
TUTORIAL = "Triton's tutorial"
FLASH = "FlashAttention-2"
SOURCES = {
    TOKAMAX: "Pallas-Triton kernels of openxla/tokamax, medians of the five timings stored in "
    "`tokamax/data/autotuning` (`nvidia_h100_80gb_hbm3`, 2026-07, and `nvidia_a100-sxm4-40gb`), "
    "bfloat16, of the block sizes that its search chose",
    TUTORIAL: "`python/tutorials/06-fused-attention.py` of triton-lang/triton, as timed by the "
    "authors of FlashAttention-3 (arXiv:2407.08608, figures 5 and 6), float16. Its block sizes "
    "were searched and are not stated; the best of a few by this estimate stand in for them",
    FLASH: "timed by the same authors, float16. It multiplies by single warps on Hopper too, so "
    "that our kernel for Ampere stands in for it. With its tiles ours would spill registers; the "
    "best of a few stand in for them",
}


@dataclass(frozen=True)
class Row:
    """One timing.

    configs: of the forward kernel, or of both backward kernels; several if the one that was used is
    not known.
    """

    source: str
    arch: int
    backward: bool
    causal: bool
    batch: int
    heads: int
    n: int
    head_dim: int
    configs: tuple[Config, ...]
    milliseconds: float
    is_fitted: bool = False
    is_alike: bool = True  # If not, our kernel for Ampere stands in, and the stated error omits it.


def _tokamax(
    arch: int, backward: bool, causal: bool, shape: tuple, config: tuple, ms: float
) -> Row:
    # The longest problems are fitted, the shorter ones predicted.
    is_fitted = shape[2] == (16384 if arch == 90 else 2048)
    return Row(TOKAMAX, arch, backward, causal, *shape, (Config(*config),), ms, is_fitted)


def _tutorial(causal: bool, shape: tuple, tflops: float) -> Row:
    sizes = [(128, 64, 4, 3), (128, 128, 8, 2), (128, 128, 8, 3)]
    configs = tuple(Config(*one) for one in sizes)
    return Row(TUTORIAL, 90, False, causal, *shape, configs, _milliseconds(causal, shape, tflops))


def _flash(shape: tuple, tflops: float) -> Row:
    sizes = [(128, 128, 4, 2), (128, 64, 4, 2), (128, 64, 8, 2), (64, 64, 4, 2)]
    configs = tuple(Config(*one) for one in sizes)
    milliseconds = _milliseconds(True, shape, tflops)
    return Row(FLASH, 90, False, True, *shape, configs, milliseconds, is_alike=False)


def _milliseconds(causal: bool, shape: tuple, tflops: float) -> float:
    batch, heads, n, width = shape
    return 4 * batch * heads * n**2 * width / (2 if causal else 1) / tflops * 1e-9


# (batch, heads, n, head_dim)
S1, W1 = (16, 32, 1024, 64), (16, 16, 1024, 128)
S2, W2 = (8, 32, 2048, 64), (8, 16, 2048, 128)
S4, W4 = (4, 32, 4096, 64), (4, 16, 4096, 128)
S8, W8 = (2, 32, 8192, 64), (2, 16, 8192, 128)
S16, W16 = (1, 32, 16384, 64), (1, 16, 16384, 128)
# (block_m, block_n, num_warps, num_stages)
ROWS = (
    _tokamax(90, False, True, S2, (128, 64, 4, 3), 0.552),
    _tokamax(90, False, False, S2, (64, 128, 4, 3), 0.923),
    _tokamax(90, False, True, W2, (64, 64, 4, 3), 0.444),
    _tokamax(90, False, False, W2, (128, 128, 8, 3), 0.732),
    _tokamax(90, False, True, S4, (64, 128, 4, 3), 0.982),
    _tokamax(90, False, False, S4, (64, 128, 4, 3), 1.783),
    _tokamax(90, False, True, W4, (128, 128, 8, 3), 0.798),
    _tokamax(90, False, False, W4, (128, 128, 8, 3), 1.381),
    _tokamax(90, False, True, S8, (128, 64, 4, 4), 1.913),
    _tokamax(90, False, False, S8, (64, 128, 4, 3), 3.512),
    _tokamax(90, False, True, W8, (128, 128, 8, 3), 1.503),
    _tokamax(90, False, False, W8, (128, 128, 8, 3), 2.789),
    _tokamax(90, False, True, S16, (64, 128, 4, 3), 3.959),
    _tokamax(90, False, False, S16, (128, 128, 4, 3), 7.280),
    _tokamax(90, False, True, W16, (128, 128, 8, 3), 3.046),
    _tokamax(90, False, False, W16, (128, 128, 8, 3), 5.304),
    _tokamax(90, True, True, S2, (64, 64, 4, 3), 1.554),
    _tokamax(90, True, False, S2, (64, 64, 4, 4), 2.740),
    _tokamax(90, True, True, W2, (64, 64, 4, 2), 1.206),
    _tokamax(90, True, False, W2, (64, 64, 4, 2), 2.191),
    _tokamax(90, True, True, S4, (64, 64, 4, 3), 2.933),
    _tokamax(90, True, False, S4, (64, 64, 4, 4), 5.301),
    _tokamax(90, True, True, W4, (64, 64, 4, 2), 2.191),
    _tokamax(90, True, False, W4, (64, 64, 4, 2), 4.270),
    _tokamax(90, True, True, S8, (64, 64, 4, 3), 5.641),
    _tokamax(90, True, False, S8, (64, 64, 4, 4), 10.567),
    _tokamax(90, True, True, W8, (64, 64, 4, 2), 4.145),
    _tokamax(90, True, False, W8, (64, 64, 4, 2), 8.410),
    _tokamax(90, True, True, S16, (64, 64, 4, 3), 10.683),
    _tokamax(90, True, False, S16, (64, 64, 4, 3), 20.475),
    _tokamax(90, True, True, W16, (64, 64, 4, 2), 8.141),
    _tokamax(90, True, False, W16, (64, 64, 4, 2), 16.520),
    _tutorial(True, S4, 363),
    _tutorial(True, W4, 353),
    _tutorial(False, S4, 400),
    _tutorial(False, W4, 389),
    _tutorial(True, S16, 363),
    _tutorial(True, W16, 378),
    _tutorial(False, S16, 403),
    _tutorial(False, W16, 395),
    _flash(S2, 262),
    _flash(S4, 284),
    _flash(S8, 295),
    _flash(S16, 299),
    _flash(W2, 298),
    _flash(W4, 319),
    _flash(W8, 333),
    _flash(W16, 335),
    _tokamax(80, False, True, S1, (64, 64, 4, 3), 0.608),
    _tokamax(80, False, False, S1, (128, 64, 4, 3), 1.011),
    _tokamax(80, False, False, W1, (128, 32, 4, 4), 0.880),
    _tokamax(80, False, False, W1, (128, 128, 8, 3), 0.887),
    _tokamax(80, False, False, W1, (128, 64, 4, 2), 0.891),
    _tokamax(80, False, True, S2, (64, 64, 4, 3), 1.108),
    _tokamax(80, False, False, S2, (128, 64, 4, 3), 1.953),
    _tokamax(80, False, False, W2, (128, 128, 8, 3), 1.653),
    _tokamax(80, False, True, (32, 32, 4096, 128), (128, 128, 8, 3), 28.341),
)
