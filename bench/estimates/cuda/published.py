"""Timings of others' warp-specialized kernels without a bias, to which the model is fitted and on
which it is tested. Ours without a bias stand in for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..times import BACKWARD, Problem

FLASH, MOSAIC, CUDNN = "FlashAttention-3", "Tokamax", "cuDNN"
SOURCES = {
    MOSAIC: "Pallas-Mosaic kernels of openxla/tokamax, medians of the five timings stored in "
    "`tokamax/data/autotuning/nvidia_h100_80gb_hbm3` (2026-08), bfloat16. Like ours, two groups of "
    "64 rows take turns. dQ and dK, dV are two passes, as in ours with an outer function; only "
    "sizes of tiles that are ours are listed",
    FLASH: "as timed by its authors (arXiv:2407.08608, figures 5 and 6), float16. Its forward pass "
    "for heads of 64 and, with a causal mask, of 128 has our tiles, groups and stages; others have "
    "larger tiles. Its backward pass, like ours, computes dQ, dK and dV together, but with larger "
    "tiles and additions to dQ in any order: ours stands in for it without waiting for turns",
    CUDNN: "timed with `jax.nn.dot_product_attention` and stored beside those of Tokamax, "
    "bfloat16. The structure of its kernels is not published",
}


@dataclass(frozen=True)
class Row:
    """One timing. is_alike: whether the kernel has the structure of ours."""

    source: str
    problem: Problem
    backward: bool
    milliseconds: float
    is_alike: bool = True

    @property
    def is_fitted(self) -> bool:
        return self.is_alike and self.problem.n == 16384

    @property
    def flops(self) -> float:
        return self.problem.flops * (BACKWARD if self.backward else 1)

    @property
    def tflops(self) -> float:
        return self.flops / self.milliseconds * 1e-9


def _problem(n: int, head_dim: int, causal: bool) -> Problem:
    return Problem(16384 // n, 2048 // head_dim, n, head_dim, causal)


def _mosaic(backward: bool, n: int, head_dim: int, causal: bool, ms: float) -> Row:
    return Row(MOSAIC, _problem(n, head_dim, causal), backward, ms)


def _flash(backward: bool, n: int, head_dim: int, causal: bool, tflops: float) -> Row:
    is_alike = not backward and (head_dim == 64 or (head_dim == 128 and causal))
    return _by_speed(FLASH, _problem(n, head_dim, causal), backward, tflops, is_alike)


def _cudnn(n: int, head_dim: int, causal: bool, tflops: float) -> Row:
    return _by_speed(CUDNN, _problem(n, head_dim, causal), False, tflops, False)


def _by_speed(source: str, problem: Problem, backward: bool, tflops: float, is_alike: bool) -> Row:
    row = Row(source, problem, backward, 1.0, is_alike)
    return replace(row, milliseconds=row.flops / tflops * 1e-9)


ROWS = (
    _mosaic(False, 2048, 128, True, 0.280),
    _mosaic(False, 2048, 128, False, 0.453),
    _mosaic(False, 4096, 128, True, 0.484),
    _mosaic(False, 4096, 128, False, 0.843),
    _mosaic(False, 8192, 128, True, 0.887),
    _mosaic(False, 8192, 128, False, 1.638),
    _mosaic(False, 16384, 128, True, 1.728),
    _mosaic(False, 16384, 128, False, 3.302),
    _mosaic(False, 2048, 256, True, 0.267),
    _mosaic(False, 2048, 256, False, 0.420),
    _mosaic(False, 4096, 256, True, 0.474),
    _mosaic(False, 4096, 256, False, 0.788),
    _mosaic(False, 8192, 256, True, 0.877),
    _mosaic(False, 8192, 256, False, 1.526),
    _mosaic(False, 16384, 256, True, 1.692),
    _mosaic(False, 16384, 256, False, 3.023),
    _mosaic(True, 2048, 64, True, 1.353),
    _mosaic(True, 4096, 64, True, 2.401),
    _mosaic(True, 2048, 128, True, 0.953),
    _mosaic(True, 2048, 128, False, 1.514),
    _mosaic(True, 4096, 128, True, 1.686),
    _mosaic(True, 4096, 128, False, 2.847),
    _mosaic(True, 8192, 128, True, 3.135),
    _mosaic(True, 8192, 128, False, 5.628),
    _mosaic(True, 16384, 128, True, 6.083),
    _mosaic(True, 16384, 128, False, 12.092),
    _flash(False, 2048, 128, False, 625),
    _flash(False, 4096, 128, False, 638),
    _flash(False, 8192, 128, False, 646),
    _flash(False, 16384, 128, False, 648),
    _flash(False, 2048, 128, True, 521),
    _flash(False, 4096, 128, True, 579),
    _flash(False, 8192, 128, True, 602),
    _flash(False, 16384, 128, True, 616),
    _flash(False, 2048, 64, False, 460),
    _flash(False, 4096, 64, False, 476),
    _flash(False, 8192, 64, False, 496),
    _flash(False, 16384, 64, False, 497),
    _flash(False, 2048, 64, True, 371),
    _flash(False, 4096, 64, True, 420),
    _flash(False, 8192, 64, True, 460),
    _flash(False, 16384, 64, True, 473),
    _flash(False, 16384, 256, False, 756),
    _flash(False, 16384, 256, True, 642),
    _flash(True, 16384, 64, False, 474),
    _flash(True, 8192, 128, False, 559),
    _flash(True, 16384, 128, False, 561),
    _cudnn(4096, 64, True, 468),
    _cudnn(8192, 64, True, 514),
    _cudnn(16384, 64, True, 538),
    _cudnn(16384, 64, False, 562),
    _cudnn(4096, 128, True, 595),
    _cudnn(8192, 128, True, 629),
    _cudnn(16384, 128, True, 645),
    _cudnn(16384, 128, False, 694),
)
