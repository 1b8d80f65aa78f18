// Backward for keys: dk_j = scale sum_i dS_ij q_i, dv_j = sum_i P_ij dO_i, and the sums over
// queries of the gradients of a trained bias.
//
// A block computes 128 keys of a key head, 64 in each of two warp groups, for all of its query
// heads in order. A third one copies tiles of queries and dO to shared memory:
//
//     for each query head, for each query tile:
//         s^T = k q^T,  dP^T = v dO^T
//         p = exp2(scale s + bias - lse), masked  # while dP is computed
//         dS = p (dP - D)
//         dv = dv + p^T dO,  dk = dk + dS^T q
//
// Both gradients of 128 keys take a register per thread and channel: with more channels than fit,
// one kernel computes dk and another dv.
#include "forms/cumulative.cuh"
#include "forms/distance.cuh"
#include "forms/linear.cuh"
#include "forms/none.cuh"
#include "forms/relative_keys.cuh"
#include "key_logits.cuh"
#include "output.cuh"
#include "query_tiles.cuh"

namespace bfa::cuda {

template <class Tile, class Form, bool kTrained, bool kHasKeys, bool kHasValues>
__device__ void accumulate_over_queries(const BackwardParams& params, BackwardShared<Tile>& shared,
                                        const Head& key_head, int first_key, Place place) {
    using Element = typename Tile::Element;
    const bool leads_warp = place.thread % 32 == 0;
    constexpr int kRows = Tile::kKeys;
    float s[kRows / 2], grad_s[kRows / 2];
    // An operand that is not needed has one element.
    float dk[kHasKeys ? Tile::kHeadDim / 2 : 1], dv[kHasValues ? Tile::kValueDim / 2 : 1];
    uint32_t rounded_p[kHasValues ? kRows / 4 : 1] = {}, rounded_s[kHasKeys ? kRows / 4 : 1] = {};
#pragma unroll
    for (float& x : dk) x = 0;
#pragma unroll
    for (float& x : dv) x = 0;

    const int64_t first = key_head.first_key + first_key;
    const int count = key_head.n_key - first_key;
    typename BackwardShared<Tile>::Place stage;
    shared.own_full.wait(0);
    for_each_head<Tile>(
        params, key_head, first_key, [&](const Block& block, QueryTiles<kRows> tiles) {
            KeyLogits<Element, kRows, Form> logits(block, place);
            float grad_sums[2] = {0, 0};
#pragma unroll 1
            for (int n = 0; n < tiles.count; ++n) {
                auto& numbers = TileNumbers<kRows>::of(shared.numbers[stage.index]);
                const float* lse = numbers.lse + place.column();
                const float* delta = numbers.delta + place.column();
                const int i = tiles.first_query(n);
                shared.ring.wait_until_full(stage);
                multiply_channels(shared, stage.index, place, s);
                if constexpr (kHasKeys) multiply_values(shared, stage.index, place, grad_s);
                wait_products<kHasKeys>(s);
                logits.complete(s, numbers, i);
                for_each_sum<kRows>([&](int n, int, int column) {
                    s[n] = exp2_approximate(s[n] * logits.multiplier - lse[column]);
                });
                if constexpr (kHasKeys) {
                    wait_products<0>(grad_s);
                    for_each_sum<kRows>([&](int n, int, int column) {
                        grad_s[n] = s[n] * (grad_s[n] - delta[column]);
                    });
                }
                if constexpr (kTrained && Form::kTrainsSums) {
                    logits.add_gradients(grad_sums, grad_s, numbers);
                }
                if constexpr (kHasValues) round_to<Element>(rounded_p, s);
                if constexpr (kHasKeys) round_to<Element>(rounded_s, grad_s);
                fence_products(rounded_p, rounded_s, dv, dk);
                if constexpr (kHasValues) {
                    multiply_columns<Element, Tile::kValueDim, kRows>(
                        dv, rounded_p, describe(shared.values[stage.index], kRows * kRowBytes),
                        true);
                }
                if constexpr (kHasKeys) {
                    multiply_columns<Element, Tile::kHeadDim, kRows>(
                        dk, rounded_s, describe(shared.channels[stage.index], kRows * kRowBytes),
                        true);
                }
                commit_products();
                wait_products<0>(dk, dv, rounded_p, rounded_s);
                __syncwarp();
                if (leads_warp) shared.ring.release(stage);
                stage.advance();
            }
            if constexpr (kTrained && Form::kTrainsSums) {
                store_sums(params.grad_key_sums.at(block.head.b, block.head.h, first), place, count,
                           grad_sums);
            }
        });

    const int b = key_head.b, h = key_head.kv_head;
    if constexpr (kHasKeys) {
        const float scale[2] = {params.problem.scale, params.problem.scale};
        multiply(dk, scale);
        store_rows(shared.own_channels, dk, {params.grad_k, b, h, first, count, params.head_dim},
                   place);
    }
    if constexpr (kHasValues) {
        store_rows(shared.own_values, dv, {params.grad_v, b, h, first, count, params.value_dim},
                   place);
    }
}

template <class Tile, class Form, bool kTrained, bool kHasKeys, bool kHasValues, int kSharedBytes>
__global__ void __launch_bounds__(3 * kGroupThreads, 1)
    attn_bwd_dkv_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(BackwardShared<Tile>) <= kSharedBytes);
    auto& shared = *reinterpret_cast<BackwardShared<Tile>*>(memory);

    const Problem& problem = params.problem;
    const Program program(problem, problem.heads / problem.group, blockIdx.x, gridDim.x, false);
    const Head head(problem, program.b, program.h * problem.group);
    const int first_key = program.block * kBlockRows;
    if (first_key >= head.n_key) return;  // a sequence that is shorter than others
    if (threadIdx.x == 0) shared.init(true);
    __syncthreads();

    const int group = int(threadIdx.x) / kGroupThreads, warp = int(threadIdx.x) / 32;
    const int lane = int(threadIdx.x) % 32;
    if (group > 0) {
        claim_registers<kRegistersOfConsumers>();
        accumulate_over_queries<Tile, Form, kTrained, kHasKeys, kHasValues>(
            params, shared, head, first_key, {group - 1, int(threadIdx.x) % kGroupThreads});
        return;
    }
    release_registers<kRegistersOfProducers>();
    if (warp == 0) {
        Copier<Tile> copier(shared, lane);
        copier.copy_own(params.k, params.v, head.first_key + first_key, head.kv_head, head.entry,
                        head.n_key - first_key, problem.sequences);
        for_each_head<Tile>(params, head, first_key, [&](const Block& block, auto tiles) {
            for (int n = 0; n < tiles.count; ++n) {
                const int i = tiles.first_query(n);
                copier.copy_tile(params.q, params.grad_o, head.first_query + i, block.head.h,
                                 head.entry, head.n_query - i, problem.sequences);
            }
        });
    } else if (warp == 1) {
        typename BackwardShared<Tile>::Place stage;
        for_each_head<Tile>(params, head, first_key, [&](const Block& block, auto tiles) {
            for (int n = 0; n < tiles.count; ++n, stage.advance()) {
                shared.ring.wait_until_empty(stage);
                stage_numbers<Tile, Form>(params, shared, block, tiles.first_query(n), stage.index,
                                          lane);
                __syncwarp();
                if (lane == 0) shared.ring.full(stage).arrive();
            }
        });
    }
}

}  // namespace bfa::cuda
