"""The variants of the kernels: which template instances there are, and how they are launched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ..shared_memory import block_bytes

ELEMENTS = {torch.bfloat16: "Bfloat16", torch.float16: "Float16"}
# Padded numbers of channels, multiples of the 64 that a row of swizzled shared memory holds.
CHANNELS = (64, 128, 192, 256)
# Padded numbers of channels of the vectors of a relative bias.
RANKS = (16, 32, 64)
# The classes in csrc/cuda/forms.
_OF_SUMS = ("Cumulative", "CumulativeWithGain", "LogSquare", "LogSquareWithGain")
_IN_ONE_PASS = ("None", "Linear", "Distance", "Cumulative", "CumulativeWithGain")
_OF_VECTORS = tuple(f"Relative<{rank}>" for rank in RANKS)
FORMS = ("None", "Linear", "Distance", *_OF_SUMS, *_OF_VECTORS)
# Channels of the widest heads with gradients and vectors, both of which need shared memory.
WIDEST_WITH_VECTORS = 128
# Channels of the widest heads whose dk and dv fit in registers beside dS and dq.
WIDEST_IN_ONE_PASS = 128
BLOCK_M = 128  # rows of a block of the backward kernels
GROUP_M = 64  # rows of a warp group
TILE_QUERIES = 64  # of a tile of the backward pass in one pass
GROUP_THREADS = 128
MOST_GROUPS = 3
ROWS_OF_DELTA = 8  # of a block, one per warp
_OTHER_BYTES = 1024  # of the form in each stage, and of the barriers


@dataclass(frozen=True)
class Tile:
    """Keys of a tile, and how many tiles are in shared memory at a time."""

    block_n: int
    stages: int


# By the larger number of padded channels of q and v.
TILES = {64: Tile(128, 2), 128: Tile(128, 2), 192: Tile(64, 2), 256: Tile(64, 2)}
BACKWARD_TILES = {64: Tile(64, 3), 128: Tile(64, 3), 192: Tile(32, 3), 256: Tile(32, 3)}
# The most channels of keys and values whose gradients one kernel computes.
_MOST_OF_BOTH = 256


@dataclass(frozen=True)
class Variant:
    """An instance of the forward kernel. head_dim and value_dim are padded numbers of channels."""

    form: str
    element: str
    head_dim: int
    value_dim: int

    source = "forward.cu"
    kernel = "attn_fwd_kernel"

    tiles = TILES

    @property
    def tile(self) -> Tile:
        tile = self.tiles[max(self.head_dim, self.value_dim)]
        fits = self._shared_bytes(tile) <= block_bytes(90)
        return tile if fits else Tile(tile.block_n, tile.stages - 1)

    @property
    def groups(self) -> int:
        """The warp groups that compute; one more copies. In narrow heads, exponentials take as long
        as products, and two groups do not hide both."""
        is_narrow = max(self.head_dim, self.value_dim) == CHANNELS[0]
        return MOST_GROUPS if is_narrow and not self.rank else 2

    @property
    def block_m(self) -> int:
        """Queries of a block, or keys."""
        return GROUP_M * self.groups

    @property
    def threads(self) -> int:
        return GROUP_THREADS * (1 + self.groups)

    @property
    def shared_bytes(self) -> int:
        """The dynamic shared memory of a block."""
        return self._shared_bytes(self.tile)

    def _shared_bytes(self, tile: Tile) -> int:
        """That of q or o, the stages of keys and values, and barriers."""
        key_bytes = 2 * tile.block_n * (self.head_dim + self.value_dim)
        rows = 2 * self.block_m * max(self.head_dim, self.value_dim)
        return rows + tile.stages * (key_bytes + self._number_bytes(tile)) + _OTHER_BYTES

    def _number_bytes(self, tile: Tile) -> int:
        """The bytes of a stage that the form may use."""
        of_table = 4 * (MOST_GROUPS * GROUP_M + tile.block_n)  # for the rows of any block
        return max(of_table, self._vector_bytes(tile))

    def _vector_bytes(self, tile: Tile) -> int:
        return 2 * self.rank * (self.block_m + tile.block_n)

    @property
    def rank(self) -> int:
        """The channels of vectors of queries and distances, 0 for forms without any."""
        _, is_relative, rank = self.form.rstrip(">").partition("Relative<")
        return int(rank) if is_relative else 0

    @property
    def expression(self) -> str:
        """The kernel in C++."""
        channels, tile = f"{self.groups}, {self.head_dim}, {self.value_dim}", self.tile
        element, form = f"bfa::cuda::{self.element}", f"bfa::cuda::forms::{self.form}"
        sizes = f"{tile.block_n}, {tile.stages}, {self._number_bytes(tile) // 4}"
        tile = f"bfa::cuda::Tile<{element}, {channels}, {sizes}>"
        return f"bfa::cuda::{self.kernel}<{', '.join([tile, form, *self._numbers])}>"

    @property
    def _numbers(self) -> list[str]:
        return [str(self.shared_bytes)]

    def __str__(self) -> str:
        return f"{self.kernel}, {self.form}, {self.element}, {self.head_dim}, {self.value_dim}"


@dataclass(frozen=True)
class Backward(Variant):
    """An instance of a backward kernel. trained: whether it computes gradients of the form.

    trainable: the forms of which it computes gradients.
    """

    trained: bool
    trainable: ClassVar[frozenset[str]]

    @classmethod
    def all_of(
        cls, form: str, element: str, head_dim: int, value_dim: int, form_gradient: bool
    ) -> list[Backward]:
        """Returns the kernels that compute a call together."""
        return [cls(form, element, head_dim, value_dim, form_gradient and form in cls.trainable)]

    tiles = BACKWARD_TILES
    groups = BLOCK_M // GROUP_M

    def _shared_bytes(self, tile: Tile) -> int:
        """That of two operands of the block's own rows, the stages of two others, and barriers."""
        channels = 2 * (self.head_dim + self.value_dim)
        stage_bytes = tile.block_n * channels + self._number_bytes(tile)
        return BLOCK_M * channels + tile.stages * stage_bytes + _OTHER_BYTES

    def _number_bytes(self, tile: Tile) -> int:
        return _OTHER_BYTES + max(_OTHER_BYTES, self._vector_bytes(tile))

    @staticmethod
    def _diagonals_bytes(tile: Tile) -> int:
        """Two stages, in which 8 warps have 8 rows of dS with margins, to sum its diagonals."""
        return 2 * 8 * 8 * 4 * (tile.block_n + 24)

    @property
    def _numbers(self) -> list[str]:
        return [str(self.trained).lower(), *super()._numbers]


class BackwardAll(Backward):
    """Of the kernel for all gradients, in one pass."""

    source = "backward.cu"
    kernel = "attn_bwd_kernel"
    trainable = frozenset(_IN_ONE_PASS) - {"None"}

    @property
    def tile(self) -> Tile:
        return Tile(TILE_QUERIES, 2)

    @classmethod
    def computes(cls, form: str, element: str, head_dim: int, value_dim: int, causal: bool) -> bool:
        """Whether there is a variant. With prefix sums, the signs of sums of dS differ between
        keys on both sides of a query."""
        fits = max(head_dim, value_dim) <= WIDEST_IN_ONE_PASS
        return fits and form in _IN_ONE_PASS and (causal or form not in _OF_SUMS)

    @property
    def has_slopes(self) -> bool:
        return self.trained and self.form == "Linear"

    @property
    def has_sums(self) -> bool:
        return self.trained and self.form in _OF_SUMS

    @property
    def sums_bytes(self) -> int:
        """Those of a tile of queries, QuerySums of csrc/cuda/query_sums.cuh."""
        return 4 * TILE_QUERIES * (self.head_dim + 2 * self.has_sums)

    @property
    def store(self) -> Store:
        """The kernel that ends the pass."""
        return Store(self.element, self.head_dim, self.has_sums)

    def _shared_bytes(self, tile: Tile) -> int:
        logits = 2 * BLOCK_M * tile.block_n
        scratch = 0  # of the warps that sum dS
        if self.has_sums:
            scratch = logits + 2 * 8 * 32 * 8  # a second stage
        elif self.trained and self.form == "Distance":
            scratch = self._diagonals_bytes(tile)
        return super()._shared_bytes(tile) + logits + self.sums_bytes + scratch + _OTHER_BYTES

    def _number_bytes(self, tile: Tile) -> int:
        """Those of lse, D and the limits of a tile, of the form, and of a separated bias."""
        of_form = max(4 * tile.block_n, MOST_GROUPS * GROUP_M + tile.block_n)
        separated = 4 + 2 * tile.block_n
        return 4 * (2 * tile.block_n + 4 + of_form + separated)


class BackwardQueries(Backward):
    """Of the kernel for dq."""

    source = "backward_queries.cu"
    kernel = "attn_bwd_dq_kernel"
    trainable = frozenset(FORMS) - {"None"}

    def _shared_bytes(self, tile: Tile) -> int:
        if not (self.trained and self.form == "Distance"):
            return super()._shared_bytes(tile)
        return super()._shared_bytes(tile) + self._diagonals_bytes(tile) + _OTHER_BYTES


@dataclass(frozen=True)
class BackwardKeys(Backward):
    """Of the kernel for dk and dv, or one of them."""

    has_keys: bool = True
    has_values: bool = True

    source = "backward_keys.cu"
    kernel = "attn_bwd_dkv_kernel"
    trainable = frozenset(_OF_SUMS)

    @classmethod
    def all_of(cls, *arguments) -> list[Backward]:
        (both,) = super().all_of(*arguments)
        if both.head_dim + both.value_dim <= _MOST_OF_BOTH:
            return [both]
        return [replace(both, has_values=False), replace(both, trained=False, has_keys=False)]

    @property
    def _numbers(self) -> list[str]:
        trained, *others = super()._numbers
        return [trained, *(str(x).lower() for x in (self.has_keys, self.has_values)), *others]

    def _number_bytes(self, tile: Tile) -> int:
        return super()._number_bytes(tile) + 2 * self.rank * tile.block_n  # of vectors of queries


@dataclass(frozen=True)
class Store:
    """An instance of the kernel that stores dq at the end of the backward pass."""

    element: str
    head_dim: int
    has_sums: bool

    source = "backward_store.cu"
    block_m = TILE_QUERIES
    threads = 2 * GROUP_THREADS
    shared_bytes = 0

    @property
    def expression(self) -> str:
        arguments = f"bfa::cuda::{self.element}, {self.head_dim}, {str(self.has_sums).lower()}"
        return f"bfa::cuda::attn_bwd_store_kernel<{arguments}>"

    def __str__(self) -> str:
        return f"attn_bwd_store_kernel, {self.element}, {self.head_dim}, {self.has_sums}"


@dataclass(frozen=True)
class Delta:
    """An instance of the kernel that prepares the backward pass."""

    element: str

    source = "backward_delta.cu"
    threads = 32 * ROWS_OF_DELTA
    shared_bytes = 0

    @property
    def expression(self) -> str:
        return f"bfa::cuda::attn_bwd_delta_kernel<bfa::cuda::{self.element}>"

    def __str__(self) -> str:
        return f"attn_bwd_delta_kernel, {self.element}"


AnyVariant = Variant | Delta | Store


def padded(channels: int) -> int:
    """Returns the number of channels of the kernels that compute `channels` of them."""
    return next(x for x in CHANNELS if x >= channels)


def usual(head_dims: tuple[int, ...] = CHANNELS) -> Iterator[AnyVariant]:
    """Yields the variants for values of head_dim channels, and those that plan such calls, which
    have few."""
    yield from map(Delta, ELEMENTS.values())
    backward = {}
    for form, element, channels in itertools.product(FORMS, ELEMENTS.values(), head_dims):
        for value_dim in sorted({channels, CHANNELS[0]}):
            yield Variant(form, element, channels, value_dim)
        if form in _OF_VECTORS and channels > WIDEST_WITH_VECTORS:
            continue
        arguments = form, element, channels, channels
        for causal, trained in itertools.product((True, False), repeat=2):
            is_one = BackwardAll.computes(*arguments, causal)
            for kind in (BackwardAll,) if is_one else (BackwardQueries, BackwardKeys):
                backward |= dict.fromkeys(kind.all_of(*arguments, trained))
    yield from backward
    yield from dict.fromkeys(x.store for x in backward if isinstance(x, BackwardAll))
