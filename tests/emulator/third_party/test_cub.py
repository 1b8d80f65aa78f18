"""CUB's block and warp primitives, compiled from NVIDIA's headers, in the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from tests import emulator

THREADS, ITEMS = 128, 4
N = THREADS * ITEMS


@pytest.fixture(scope="module")
def kernels(cuda_ptx):
    return emulator.parse(cuda_ptx("cub_kernels.cu")).kernels


@pytest.fixture
def launch(kernels, seed):
    """Runs one block of a kernel."""

    def run(name: str, *arguments) -> None:
        emulator.launch(
            kernels[name],
            grid=(1, 1, 1),
            block=(THREADS, 1, 1),
            arguments=list(arguments),
            seed=seed,
        )

    return run


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)


def integers(rng, n: int = N, dtype=np.int32) -> np.ndarray:
    return rng.integers(-1000, 1000, n).astype(dtype)


@pytest.mark.parametrize("valid", [1, 33, THREADS])
@pytest.mark.parametrize("algorithm", ["warps", "raking"])
def test_block_reduce_sums_and_finds_maxima(launch, rng, algorithm, valid):
    values, out = integers(rng, THREADS), np.zeros(2, np.int32)
    launch(f"reduce_{algorithm}", values, out, valid)
    assert out.tolist() == [values.sum(), values[:valid].max()]


def test_block_reduce_sums_halves_in_float(launch, rng):
    # Multiples of 1/8 below 16: every sum of them is exact.
    values, out = (rng.integers(-128, 128, N) / 8).astype(np.float16), np.zeros(1, np.float32)
    launch("reduce_halves", values, out)
    assert out[0] == values.astype(np.float64).sum()


@pytest.mark.parametrize("algorithm", ["warps", "raking"])
def test_block_scan_gives_inclusive_and_exclusive_sums(launch, rng, algorithm):
    values, total = integers(rng), np.zeros(1, np.int32)
    inclusive, exclusive = np.zeros((2, N), np.int32)
    launch(f"scan_{algorithm}", values, inclusive, exclusive, total)
    sums = values.cumsum(dtype=np.int32)
    np.testing.assert_array_equal(inclusive, sums)
    np.testing.assert_array_equal(exclusive, sums - values)
    assert total[0] == sums[-1]


def test_block_radix_sort_sorts_floats_of_both_signs(launch, rng):
    keys = rng.standard_normal(N).astype(np.float32)
    keys[::7] = 0.0
    expected = np.sort(keys)
    launch("sort_keys", keys)
    np.testing.assert_array_equal(keys, expected)


def test_block_radix_sort_of_pairs_is_stable(launch, rng):
    keys = rng.integers(0, 50, N).astype(np.uint32)
    numbers = np.arange(N, dtype=np.uint16)
    order = np.argsort(-keys.astype(np.int64), kind="stable")
    expected = keys[order], numbers[order]
    launch("sort_pairs", keys, numbers)
    np.testing.assert_array_equal(keys, expected[0])
    np.testing.assert_array_equal(numbers, expected[1])


def test_block_merge_sort_sorts_64_bit_integers(launch, rng):
    keys = rng.integers(-(2**62), 2**62, N)
    expected = np.sort(keys)
    launch("sort_merge", keys)
    np.testing.assert_array_equal(keys, expected)


@pytest.mark.parametrize("valid", [1, 201, N])
@pytest.mark.parametrize("algorithm", ["transpose", "warp_transpose"])
def test_block_load_and_store_through_shared_memory(launch, rng, algorithm, valid):
    """The kernel reverses the items of every thread; invalid ones are read as -1."""
    values = rng.standard_normal(valid).astype(np.float32)
    out = np.zeros(valid, np.float32)
    launch(f"copy_{algorithm}", values, out, valid)
    padded = np.full(N, -1, np.float32)
    padded[:valid] = values
    np.testing.assert_array_equal(out, padded.reshape(THREADS, ITEMS)[:, ::-1].ravel()[:valid])


def test_block_load_and_store_of_vectors(launch, rng):
    values, out = rng.standard_normal(N).astype(np.float32), np.zeros(N, np.float32)
    launch("copy_vectors", values, out)
    np.testing.assert_array_equal(out, 2 * values)


def test_block_exchange_transposes_and_scatters_doubles(launch, rng):
    values, ranks = rng.standard_normal(N), rng.permutation(N).astype(np.int32)
    striped, scattered = np.zeros((2, N))
    launch("exchange", values, striped, scattered, ranks)
    np.testing.assert_array_equal(striped, values.reshape(ITEMS, THREADS).T.ravel())
    np.testing.assert_array_equal(scattered[ranks], values)


def test_block_histogram_counts_with_atomics_in_shared_memory(launch, rng):
    samples, counts = rng.integers(0, 20, N).astype(np.uint8), np.zeros(256, np.uint32)
    launch("histogram", samples, counts)
    np.testing.assert_array_equal(counts, np.bincount(samples, minlength=256))


def test_block_adjacent_difference(launch, rng):
    values = integers(rng)
    expected = np.diff(values, prepend=0)
    expected[0] = values[0]
    launch("differences", values)
    np.testing.assert_array_equal(values, expected)


def test_warp_primitives_work_on_groups_of_lanes(launch, rng):
    values = rng.integers(0, 2**32, THREADS, dtype=np.uint32)
    sums, products = np.zeros(THREADS // 16, np.uint32), np.zeros(THREADS, np.uint32)
    launch("groups_of_lanes", values, sums, products)
    np.testing.assert_array_equal(sums, values.reshape(-1, 16).sum(1, dtype=np.uint32))
    groups = values.reshape(-1, 8)
    np.testing.assert_array_equal(products, np.cumprod(groups, 1, dtype=np.uint32).ravel())
