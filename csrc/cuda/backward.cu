// Backward: dq_i = scale sum_j dS_ij k_j, dk_j = scale sum_i dS_ij q_i, dv_j = sum_i P_ij dO_i, and
// the gradients of a trained bias, in one pass.
//
// A block computes 128 keys of a key head, 64 in each of two warp groups, for all of its query
// heads in order:
//
//     for each query head, for each query tile, the last one first:
//         s^T = k q^T,  dP^T = v dO^T
//         p = exp2(scale s + bias - lse), masked  # while dP is computed
//         dS = p (dP - D)
//         dv = dv + p^T dO,  dk = dk + dS^T q
//         dq of the tile = dS k                   # for all 128 keys
//
// In a third group, one warp copies tiles, one adds dq to the sums of earlier keys, and two compute
// gradients of the bias from dS.
#include "backward_producers.cuh"
#include "forms/cumulative.cuh"
#include "forms/distance.cuh"
#include "forms/linear.cuh"
#include "forms/none.cuh"
#include "key_logits.cuh"
#include "output.cuh"

namespace bfa::cuda {

// How the gradients of a form's operands are computed.
template <class Form, bool kTrained>
struct Trains {
    static constexpr bool kTable = kTrained && Form::kTrainsTable;
    static constexpr bool kSums = kTrained && Form::kTrainsSums;
    static constexpr bool kSlopes = kTrained && Form::kTrainsGain && !Form::kTrainsSums;
    // Warps that sum over keys, and over queries.
    static constexpr int kSummers = kSums ? 2 : 0;
};

template <class Tile, class Form, class Trained>
struct Shared : BackwardShared<Tile> {
    using Element = typename Tile::Element;
    using Sums = QuerySums<Tile::kHeadDim, Trained::kSums>;
    using Table = Diagonals<kTileQueries, true>;
    using OverKeys = SumsOverKeys<Element, Form>;
    using OverQueries = SumsOverQueries<Element, Form>;
    struct Scratch {
        typename OverKeys::Weights weights;
        typename OverQueries::Sums sums;
    };

    // Two if other warps read dS too, which take longer.
    static constexpr int kGradStages = Trained::kSums ? 2 : 1;

    alignas(1024) GradLogits<Element> grad_s[kGradStages];
    alignas(128) Sums sums;
    Optional<Trained::kTable, Table> diagonals;
    Optional<Trained::kSums, Scratch> scratch;
    Ring<kGradStages> grad_s_ring;
    Ring<1> sums_ring;
    int rank;

    __device__ void init() {
        BackwardShared<Tile>::init(true, kConsumerWarps + Trained::kSummers);
        grad_s_ring.init(kConsumerWarps, kConsumerWarps + Trained::kSummers);
        sums_ring.init(kConsumerWarps + (Trained::kSums ? 1 : 0), 1);
        fence_barrier_init();
    }
};

// A warp group that computes its keys.
template <class Tile, class Form, class Trained, class Shared>
class Consumer {
    using Element = typename Tile::Element;
    static constexpr int kQueries = kTileQueries;
    using Logits = KeyLogits<Element, kQueries, Form, Form::kSeparates>;
    using GradStage = Stage<Shared::kGradStages>;
    static_assert(Tile::kKeys == kQueries);
    // Of narrow heads, registers can keep the keys and values, which products need not read again.
    static constexpr bool kKeeps = maximum(Tile::kHeadDim, Tile::kValueDim) == kPanel;
    static constexpr int kDq = Tile::kHeadDim / 4;  // numbers of a thread

public:
    __device__ Consumer(const BackwardParams& params, Shared& shared, const Keys& keys, Place place)
        : params_(params),
          shared_(shared),
          keys_(keys),
          place_(place),
          leads_warp_(place.thread % 32 == 0) {}

    __device__ void run() {
        float dk[Tile::kHeadDim / 2], dv[Tile::kValueDim / 2];
#pragma unroll
        for (float& x : dk) x = 0;
#pragma unroll
        for (float& x : dv) x = 0;
        shared_.own_full.wait(0);
        if constexpr (kKeeps) {
            const int row = place_.first_row_of_warp(), lane = place_.thread % 32;
            load_fragments(k_, shared_.own_channels, row, lane);
            load_fragments(v_, shared_.own_values, row, lane);
            __syncwarp();  // gradients replace them
        }
        for_each_head<Tile>(params_, keys_.head, keys_.first, [&](const Block& block, auto tiles) {
            Logits logits(block, place_);
            float slope_sums[2] = {0, 0};
#pragma unroll 1
            for (int n = tiles.count - 1; n >= 0; --n) add_tile(logits, dk, dv, slope_sums);
            if constexpr (Trained::kSlopes) {
                const Head& head = block.head;
                store_sums(params_.grad_key_sums.at(head.b, head.h, keys_.row()), place_,
                           keys_.count(), slope_sums);
            }
        });
        // dk replaces keys that the other group reads too, for dq of its last tile.
        for (int n = 0; n < Shared::kGradStages; ++n)
            shared_.grad_s_ring.wait_until_empty(GradStage::of(tile_ + n));
        const Head& head = keys_.head;
        const float scale[2] = {params_.problem.scale, params_.problem.scale};
        multiply(dk, scale);
        store_rows(
            shared_.own_channels, dk,
            {params_.grad_k, head.b, head.kv_head, keys_.row(), keys_.count(), params_.head_dim},
            place_);
        store_rows(
            shared_.own_values, dv,
            {params_.grad_v, head.b, head.kv_head, keys_.row(), keys_.count(), params_.value_dim},
            place_);
    }

private:
    __device__ void add_tile(const Logits& logits, float (&dk)[Tile::kHeadDim / 2],
                             float (&dv)[Tile::kValueDim / 2], float (&slope_sums)[2]) {
        const auto stage = BackwardShared<Tile>::Place::of(tile_);
        auto& numbers = TileNumbers<kQueries>::of(shared_.numbers[stage.index]);
        const float* delta = numbers.delta + place_.column();
        float s[kQueries / 2], grad_s[kQueries / 2], dq[kDq];
        uint32_t rounded_p[kQueries / 4], rounded_s[kQueries / 4];
        shared_.ring.wait_until_full(stage);
        if constexpr (kKeeps) {
            multiply_kept(s, k_, shared_.channels[stage.index]);
            multiply_kept(grad_s, v_, shared_.values[stage.index]);
        } else {
            multiply_channels(shared_, stage.index, place_, s);
            multiply_values(shared_, stage.index, place_, grad_s);
        }
        wait_products<1>(s);
        logits.exponentiate(s, numbers);
        round_to<Element>(rounded_p, s);
        fence_products(rounded_p, dv);
        multiply_columns<Element, Tile::kValueDim, kQueries>(
            dv, rounded_p, describe(shared_.values[stage.index], kQueries * kRowBytes), true);
        commit_products();
        wait_products<1>(grad_s);
        for_each_sum<kQueries>(
            [&](int n, int, int column) { grad_s[n] = s[n] * (grad_s[n] - delta[column]); });
        if constexpr (Trained::kSlopes) {
            logits.add_gradients(slope_sums, grad_s, numbers);
        }
        if constexpr (Trained::kTable) {
            shared_.diagonals.add(Stage<Shared::Table::kStages>::of(tile_), place_, grad_s);
        }
        round_to<Element>(rounded_s, grad_s);
        store_grad_s(rounded_s);
        shared_.grad_s_ring.wait_until_full(GradStage::of(tile_));
        multiply_keys(dq);
        fence_products(rounded_s, dk);
        multiply_columns<Element, Tile::kHeadDim, kQueries>(
            dk, rounded_s, describe(shared_.channels[stage.index], kQueries * kRowBytes), true);
        commit_products();
        wait_products<1>(dq, dv, rounded_p);
        if (leads_warp_) shared_.grad_s_ring.release(GradStage::of(tile_));
        store_dq(dq);
        wait_products<0>(dk, rounded_s);
        __syncwarp();
        if (leads_warp_) shared_.ring.release(stage);
        ++tile_;
    }
    // Lets both groups and the summing warps read dS.
    __device__ void store_grad_s(const uint32_t (&rounded)[kQueries / 4]) {
        shared_.grad_s_ring.wait_until_empty(GradStage::of(tile_));
        // Registers are scarce: addresses are computed again for each tile.
        const int thread = int(thread_again()) - kGroupThreads;
        store_fragments(shared_.grad_s[GradStage::of(tile_).index], rounded, thread / 32 * 16,
                        thread % 32);
        fence_async_proxy();
        __syncwarp();
        if (leads_warp_) shared_.grad_s_ring.full(GradStage::of(tile_)).arrive();
    }
    template <class Rows>
    __device__ void multiply_kept(float (&d)[kQueries / 2], uint32_t (&kept)[kPanel / 4],
                                  const Rows& rows) {
        fence_products(d, kept);
        multiply_rows<Element, kQueries>(d, kept, describe(rows));
        commit_products();
    }
    // For half of the channels.
    __device__ void multiply_keys(float (&dq)[kDq]) {
        constexpr int kColumns = Tile::kHeadDim / 2;
        const int first = place_.group * kColumns;
        fence_products(dq);
        multiply_transposed<Element, kColumns, kBlockRows>(
            dq, describe(shared_.grad_s[GradStage::of(tile_).index]),
            describe(&shared_.own_channels[first / kPanel][0][first % kPanel]));
        commit_products();
    }
    __device__ void store_dq(const float (&dq)[kDq]) {
        shared_.sums_ring.wait_until_empty(Stage<1>::of(tile_));
#pragma unroll
        for (int n = 0; n < kDq / 4; ++n) {
            float* to = shared_.sums.dq[place_.group][n][place_.thread];
            *reinterpret_cast<float4*>(to) = {dq[4 * n], dq[4 * n + 1], dq[4 * n + 2],
                                              dq[4 * n + 3]};
        }
        fence_async_proxy();
        __syncwarp();
        if (leads_warp_) shared_.sums_ring.full(Stage<1>::of(tile_)).arrive();
    }

    const BackwardParams& params_;
    Shared& shared_;
    const Keys& keys_;
    const Place place_;
    const bool leads_warp_;
    uint32_t k_[kPanel / 4], v_[kPanel / 4];  // if kept
    int tile_ = 0;  // how many tiles came before; all stages follow from it
};

template <class Tile, class Form, bool kTrained, int kSharedBytes>
__global__ void __launch_bounds__(3 * kGroupThreads, 1)
    attn_bwd_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    using Trained = Trains<Form, kTrained>;
    using Shared = Shared<Tile, Form, Trained>;
    static_assert(sizeof(Shared) <= kSharedBytes);
    auto& shared = *reinterpret_cast<Shared*>(memory);
    if constexpr (Trained::kTable) shared.diagonals.init();
    if (threadIdx.x == 0) {
        shared.init();
        shared.rank = atomicAdd(params.tickets, 1);
    }
    __syncthreads();

    const Problem& problem = params.problem;
    const int rank = __shfl_sync(~0u, shared.rank, 0);
    const Program program(problem, problem.heads / problem.group, rank, gridDim.x, false);
    const Keys keys{Head(problem, program.b, program.h * problem.group),
                    program.block * kBlockRows};
    if (keys.count() <= 0) return;  // a sequence that is shorter than others

    const int warp = __shfl_sync(~0u, int(threadIdx.x) / 32, 0), group = warp / 4;
    const int lane = int(threadIdx.x) % 32;
    if (group > 0) {
        claim_registers<kRegistersOfConsumers>();
        const Place place{group - 1, int(threadIdx.x) % kGroupThreads};
        Consumer<Tile, Form, Trained, Shared>(params, shared, keys, place).run();
        return;
    }
    release_registers<kRegistersOfProducers>();
    if (warp == 0) {
        produce<Tile, Form>(params, shared, keys, lane);
    } else if (warp == 1) {
        if (lane > 0) return;
        Adder<typename Shared::Sums> adder(params, shared.sums, shared.sums_ring);
        for_each_head<Tile>(params, keys.head, keys.first,
                            [&](const Block& block, auto tiles) { adder.add(block, tiles); });
    } else if constexpr (Trained::kTable) {
        sum_table<Tile>(params, shared, keys, warp - kFirstSummer, lane);
    } else if constexpr (Trained::kSums) {
        if (warp == kFirstSummer)
            sum_over_keys<Tile, Form>(params, shared, keys, lane);
        else
            sum_over_queries<Tile, Form>(params, shared, keys, lane);
    }
}

}  // namespace bfa::cuda
