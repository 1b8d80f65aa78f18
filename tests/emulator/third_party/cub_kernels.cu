// Small kernels of one block each around the block and warp primitives of CUB.
#include <cub/block/block_adjacent_difference.cuh>
#include <cub/block/block_exchange.cuh>
#include <cub/block/block_histogram.cuh>
#include <cub/block/block_load.cuh>
#include <cub/block/block_merge_sort.cuh>
#include <cub/block/block_radix_sort.cuh>
#include <cub/block/block_reduce.cuh>
#include <cub/block/block_scan.cuh>
#include <cub/block/block_store.cuh>
#include <cub/warp/warp_reduce.cuh>
#include <cub/warp/warp_scan.cuh>

constexpr int THREADS = 128;
constexpr int ITEMS = 4;

struct Largest {
  __device__ int operator()(int a, int b) const { return a > b ? a : b; }
};

template <cub::BlockReduceAlgorithm ALGORITHM>
__device__ void reduce(const int* in, int* out, int valid) {
  using Reduce = cub::BlockReduce<int, THREADS, ALGORITHM>;
  __shared__ typename Reduce::TempStorage storage;
  int const sum = Reduce(storage).Sum(in[threadIdx.x]);
  __syncthreads();
  int const largest = Reduce(storage).Reduce(in[threadIdx.x], Largest{}, valid);
  if (threadIdx.x == 0) {
    out[0] = sum;
    out[1] = largest;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_warps(const int* in, int* out, int valid) {
  reduce<cub::BLOCK_REDUCE_WARP_REDUCTIONS>(in, out, valid);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_raking(const int* in, int* out, int valid) {
  reduce<cub::BLOCK_REDUCE_RAKING>(in, out, valid);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_halves(const __half* in, float* out) {
  using Reduce = cub::BlockReduce<float, THREADS>;
  __shared__ typename Reduce::TempStorage storage;
  float values[ITEMS];
  for (int i = 0; i < ITEMS; ++i) values[i] = __half2float(in[threadIdx.x * ITEMS + i]);
  float const sum = Reduce(storage).Sum(values);
  if (threadIdx.x == 0) *out = sum;
}

template <cub::BlockScanAlgorithm ALGORITHM>
__device__ void scan(const int* in, int* inclusive, int* exclusive, int* total) {
  using Scan = cub::BlockScan<int, THREADS, ALGORITHM>;
  __shared__ typename Scan::TempStorage storage;
  int values[ITEMS], sums[ITEMS], aggregate;
  for (int i = 0; i < ITEMS; ++i) values[i] = in[threadIdx.x * ITEMS + i];
  Scan(storage).InclusiveSum(values, sums);
  for (int i = 0; i < ITEMS; ++i) inclusive[threadIdx.x * ITEMS + i] = sums[i];
  __syncthreads();
  Scan(storage).ExclusiveSum(values, sums, aggregate);
  for (int i = 0; i < ITEMS; ++i) exclusive[threadIdx.x * ITEMS + i] = sums[i];
  if (threadIdx.x == 0) *total = aggregate;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scan_warps(const int* in, int* inclusive, int* exclusive, int* total) {
  scan<cub::BLOCK_SCAN_WARP_SCANS>(in, inclusive, exclusive, total);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    scan_raking(const int* in, int* inclusive, int* exclusive, int* total) {
  scan<cub::BLOCK_SCAN_RAKING_MEMOIZE>(in, inclusive, exclusive, total);
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_keys(float* keys) {
  using Sort = cub::BlockRadixSort<float, THREADS, ITEMS>;
  __shared__ typename Sort::TempStorage storage;
  float values[ITEMS];
  for (int i = 0; i < ITEMS; ++i) values[i] = keys[threadIdx.x * ITEMS + i];
  Sort(storage).Sort(values);
  for (int i = 0; i < ITEMS; ++i) keys[threadIdx.x * ITEMS + i] = values[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sort_pairs(unsigned* keys, unsigned short* numbers) {
  using Sort = cub::BlockRadixSort<unsigned, THREADS, ITEMS, unsigned short>;
  __shared__ typename Sort::TempStorage storage;
  unsigned values[ITEMS];
  unsigned short places[ITEMS];
  for (int i = 0; i < ITEMS; ++i) {
    values[i] = keys[threadIdx.x * ITEMS + i];
    places[i] = numbers[threadIdx.x * ITEMS + i];
  }
  Sort(storage).SortDescendingBlockedToStriped(values, places);
  for (int i = 0; i < ITEMS; ++i) {
    keys[i * THREADS + threadIdx.x] = values[i];
    numbers[i * THREADS + threadIdx.x] = places[i];
  }
}

struct Less {
  __device__ bool operator()(long long a, long long b) const { return a < b; }
};

extern "C" __global__ void __launch_bounds__(THREADS) sort_merge(long long* keys) {
  using Sort = cub::BlockMergeSort<long long, THREADS, ITEMS>;
  __shared__ typename Sort::TempStorage storage;
  // The merge reads one key beyond the last, and ignores it.
  auto* words = reinterpret_cast<unsigned*>(&storage);
  for (int i = threadIdx.x; i < sizeof storage / 4; i += THREADS) words[i] = 0;
  __syncthreads();
  long long values[ITEMS];
  for (int i = 0; i < ITEMS; ++i) values[i] = keys[threadIdx.x * ITEMS + i];
  Sort(storage).StableSort(values, Less{});
  for (int i = 0; i < ITEMS; ++i) keys[threadIdx.x * ITEMS + i] = values[i];
}

// Reverses the items of every thread between a load and a store that go through shared memory.
template <cub::BlockLoadAlgorithm LOAD, cub::BlockStoreAlgorithm STORE>
__device__ void copy(const float* in, float* out, int valid) {
  using Load = cub::BlockLoad<float, THREADS, ITEMS, LOAD>;
  using Store = cub::BlockStore<float, THREADS, ITEMS, STORE>;
  __shared__ union {
    typename Load::TempStorage load;
    typename Store::TempStorage store;
  } storage;
  float values[ITEMS], reversed[ITEMS];
  Load(storage.load).Load(in, values, valid, -1.0f);
  for (int i = 0; i < ITEMS; ++i) reversed[i] = values[ITEMS - 1 - i];
  __syncthreads();
  Store(storage.store).Store(out, reversed, valid);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_transpose(const float* in, float* out, int valid) {
  copy<cub::BLOCK_LOAD_TRANSPOSE, cub::BLOCK_STORE_TRANSPOSE>(in, out, valid);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_warp_transpose(const float* in, float* out, int valid) {
  copy<cub::BLOCK_LOAD_WARP_TRANSPOSE, cub::BLOCK_STORE_WARP_TRANSPOSE>(in, out, valid);
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_vectors(const float* in, float* out) {
  using Load = cub::BlockLoad<float, THREADS, ITEMS, cub::BLOCK_LOAD_VECTORIZE>;
  using Store = cub::BlockStore<float, THREADS, ITEMS, cub::BLOCK_STORE_VECTORIZE>;
  float values[ITEMS];
  Load().Load(in, values);
  for (int i = 0; i < ITEMS; ++i) values[i] *= 2.0f;
  Store().Store(out, values);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    exchange(const double* in, double* striped, double* scattered, const int* ranks) {
  using Exchange = cub::BlockExchange<double, THREADS, ITEMS>;
  __shared__ typename Exchange::TempStorage storage;
  double values[ITEMS];
  int places[ITEMS];
  for (int i = 0; i < ITEMS; ++i) {
    values[i] = in[threadIdx.x * ITEMS + i];
    places[i] = ranks[threadIdx.x * ITEMS + i];
  }
  Exchange(storage).BlockedToStriped(values);
  for (int i = 0; i < ITEMS; ++i) striped[threadIdx.x * ITEMS + i] = values[i];
  for (int i = 0; i < ITEMS; ++i) values[i] = in[threadIdx.x * ITEMS + i];
  __syncthreads();
  Exchange(storage).ScatterToBlocked(values, places);
  for (int i = 0; i < ITEMS; ++i) scattered[threadIdx.x * ITEMS + i] = values[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    histogram(const unsigned char* samples, unsigned* counts) {
  using Histogram = cub::BlockHistogram<unsigned char, THREADS, ITEMS, 256, cub::BLOCK_HISTO_ATOMIC>;
  __shared__ typename Histogram::TempStorage storage;
  __shared__ unsigned bins[256];
  unsigned char values[ITEMS];
  for (int i = 0; i < ITEMS; ++i) values[i] = samples[threadIdx.x * ITEMS + i];
  Histogram(storage).Histogram(values, bins);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += THREADS) counts[i] = bins[i];
}

struct Minus {
  __device__ int operator()(int a, int b) const { return a - b; }
};

extern "C" __global__ void __launch_bounds__(THREADS) differences(int* values) {
  using Difference = cub::BlockAdjacentDifference<int, THREADS>;
  __shared__ typename Difference::TempStorage storage;
  int items[ITEMS], out[ITEMS];
  for (int i = 0; i < ITEMS; ++i) items[i] = values[threadIdx.x * ITEMS + i];
  Difference(storage).SubtractLeft(items, out, Minus{});
  for (int i = 0; i < ITEMS; ++i) values[threadIdx.x * ITEMS + i] = out[i];
}

// Sums of groups of 16 lanes, and inclusive scans of groups of 8 with products modulo 2^32.
struct Product {
  __device__ unsigned operator()(unsigned a, unsigned b) const { return a * b; }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    groups_of_lanes(const unsigned* in, unsigned* sums, unsigned* products) {
  using Reduce = cub::WarpReduce<unsigned, 16>;
  using Scan = cub::WarpScan<unsigned, 8>;
  __shared__ typename Reduce::TempStorage reduce_storage[THREADS / 16];
  __shared__ typename Scan::TempStorage scan_storage[THREADS / 8];
  unsigned const value = in[threadIdx.x];
  unsigned const sum = Reduce(reduce_storage[threadIdx.x / 16]).Sum(value);
  if (threadIdx.x % 16 == 0) sums[threadIdx.x / 16] = sum;
  unsigned product;
  Scan(scan_storage[threadIdx.x / 8]).InclusiveScan(value, product, Product{});
  products[threadIdx.x] = product;
}
