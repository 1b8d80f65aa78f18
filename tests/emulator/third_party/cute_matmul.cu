// C = A B^T on Hopper with CuTe: TMA loads A (m, k) and B (n, k) in fp16 and stores C (m, n).
//
// One warpgroup loads and two multiply, connected by a ring of stages: `full` counts the bytes that
// arrive in a stage, `empty` the warpgroups that have finished reading it. In a cluster of two,
// both blocks compute the same columns of C, so each loads half of a tile of B for both.
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/numeric_types.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

using namespace cute;
using Half = cutlass::half_t;
using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;

constexpr int BLOCK_M = 128;
constexpr int BLOCK_N = 128;
constexpr int BLOCK_K = 64;
constexpr int STAGES = 3;
constexpr int CONSUMERS = 2;
constexpr int THREADS = (1 + CONSUMERS) * 128;

using Atom = GMMA::Layout_K_SW128_Atom<Half>;
using LayoutA = decltype(tile_to_shape(Atom{}, Shape<Int<BLOCK_M>, Int<BLOCK_K>, Int<STAGES>>{}));
using LayoutB = decltype(tile_to_shape(Atom{}, Shape<Int<BLOCK_N>, Int<BLOCK_K>, Int<STAGES>>{}));
using LayoutC = Layout<Shape<Int<BLOCK_M>, Int<BLOCK_N>>, Stride<Int<BLOCK_N>, _1>>;
using Mma = decltype(make_tiled_mma(SM90_64x128x16_F32F16F16_SS<GMMA::Major::K, GMMA::Major::K>{},
                                    Layout<Shape<Int<CONSUMERS>, _1, _1>>{}));

struct Shared {
  alignas(1024) Half a[cosize_v<LayoutA>];
  alignas(1024) Half b[cosize_v<LayoutB>];
  alignas(1024) Half c[cosize_v<LayoutC>];
  Full full[STAGES];
  Empty empty[STAGES];
};

// A position in the ring, and the parity of the round.
struct Stage {
  int index;
  uint32_t parity;
  __device__ void advance() {
    index = (index + 1) % STAGES;
    parity ^= index == 0;
  }
};

template <int CLUSTER>
__device__ void load(Shared& shared, TmaDescriptor const& a, TmaDescriptor const& b, int k_tiles) {
  constexpr int bytes = (BLOCK_M + BLOCK_N) * BLOCK_K * sizeof(Half);
  constexpr int part = BLOCK_N / CLUSTER;
  constexpr auto hint = static_cast<uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
  int const rank = CLUSTER == 1 ? 0 : block_rank_in_cluster();
  // The phase before the first one of a new barrier counts as complete.
  Stage stage{0, 1};
#pragma unroll 1
  for (int k = 0; k < k_tiles; ++k, stage.advance()) {
    int const i = stage.index;
    shared.empty[i].wait(stage.parity);
    shared.full[i].arrive_and_expect_tx(bytes);
    auto* barrier = reinterpret_cast<uint64_t*>(&shared.full[i]);
    Half* const tile_b = shared.b + (i * BLOCK_N + rank * part) * BLOCK_K;
    int const row_b = blockIdx.y * BLOCK_N + rank * part;
    SM90_TMA_LOAD_2D::copy(&a, barrier, hint, shared.a + i * BLOCK_M * BLOCK_K, k * BLOCK_K,
                           blockIdx.x * BLOCK_M);
    if constexpr (CLUSTER == 1)
      SM90_TMA_LOAD_2D::copy(&b, barrier, hint, tile_b, k * BLOCK_K, row_b);
    else
      SM90_TMA_LOAD_MULTICAST_2D::copy(&b, barrier, (1 << CLUSTER) - 1, hint, tile_b, k * BLOCK_K,
                                       row_b);
  }
}

template <int CLUSTER>
__device__ void multiply(Shared& shared, TmaDescriptor const& c, int k_tiles) {
  int const thread = threadIdx.x - 128;
  Mma mma;
  auto const mine = mma.get_slice(thread);
  Tensor a = make_tensor(make_smem_ptr(shared.a), LayoutA{});
  Tensor b = make_tensor(make_smem_ptr(shared.b), LayoutB{});
  Tensor fragments_a = mine.partition_fragment_A(a);
  Tensor fragments_b = mine.partition_fragment_B(b);
  Tensor sums = partition_fragment_C(mma, Shape<Int<BLOCK_M>, Int<BLOCK_N>>{});
  clear(sums);
  // A warpgroup signals to every block of the cluster that it has read a stage.
  auto const release = [&](int i) {
    if (thread % 128 < CLUSTER) shared.empty[i].arrive(thread % 128);
  };
  Stage stage{0, 0};
  int previous = 0;
#pragma unroll 1
  for (int k = 0; k < k_tiles; ++k, stage.advance()) {
    int const i = stage.index;
    shared.full[i].wait(stage.parity);
    warpgroup_fence_operand(sums);
    warpgroup_arrive();
    gemm(mma, fragments_a(_, _, _, i), fragments_b(_, _, _, i), sums);
    warpgroup_commit_batch();
    warpgroup_wait<1>();
    warpgroup_fence_operand(sums);
    if (k > 0) release(previous);
    previous = i;
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(sums);

  Tensor out = make_tensor(make_smem_ptr(shared.c), LayoutC{});
  Tensor target = mine.partition_C(out);
  for (int i = 0; i < size(sums); ++i) target(i) = Half(sums(i));
  tma_store_fence();
  cutlass::arch::NamedBarrier::sync(CONSUMERS * 128, 1);
  if (thread == 0) {
    SM90_TMA_STORE_2D::copy(&c, shared.c, blockIdx.y * BLOCK_N, blockIdx.x * BLOCK_M);
    tma_store_arrive();
    tma_store_wait<0>();
  }
}

template <int CLUSTER>
__device__ void matmul(TmaDescriptor const& a, TmaDescriptor const& b, TmaDescriptor const& c,
                       int k_tiles) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    prefetch_tma_descriptor(&a);
    prefetch_tma_descriptor(&b);
    for (int i = 0; i < STAGES; ++i) {
      shared.full[i].init(1);
      shared.empty[i].init(CONSUMERS * CLUSTER);
    }
    cutlass::arch::fence_barrier_init();
  }
  if constexpr (CLUSTER == 1) __syncthreads();
  else cluster_sync();

  if (threadIdx.x < 128) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (threadIdx.x == 0) load<CLUSTER>(shared, a, b, k_tiles);
    __syncwarp();
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    multiply<CLUSTER>(shared, c, k_tiles);
  }
  // The other block may still multicast into this one's memory or arrive at its barriers.
  if constexpr (CLUSTER > 1) cluster_sync();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    matmul_alone(const __grid_constant__ TmaDescriptor a, const __grid_constant__ TmaDescriptor b,
                 const __grid_constant__ TmaDescriptor c, int k_tiles) {
  matmul<1>(a, b, c, k_tiles);
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1)
    matmul_cluster(const __grid_constant__ TmaDescriptor a, const __grid_constant__ TmaDescriptor b,
                   const __grid_constant__ TmaDescriptor c, int k_tiles) {
  matmul<2>(a, b, c, k_tiles);
}
