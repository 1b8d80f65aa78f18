// Backward for queries: dq_i = scale sum_j dS_ij k_j, and the sums over keys of the gradients of a
// trained bias, or along diagonals that of a table of distances.
//
// A block computes 128 queries of a head, 64 in each of two warp groups. A third one copies tiles
// of keys and values to shared memory:
//
//     for each key tile:
//         s = q k^T,  dP = dO v^T
//         dq = dq + dS k                          # dS and k of the previous tile
//         p = exp2(scale s + bias - lse), masked  # while dq is computed
//         dS = p (dP - D)
#include "backward_tiles.cuh"
#include "diagonals.cuh"
#include "forms/cumulative.cuh"
#include "forms/distance.cuh"
#include "forms/linear.cuh"
#include "forms/none.cuh"
#include "forms/relative_queries.cuh"
#include "logits.cuh"
#include "output.cuh"

namespace bfa::cuda {

template <class Tile, bool kTrainsTable>
struct QueryShared : BackwardShared<Tile> {
    Optional<kTrainsTable, Diagonals<Tile::kKeys, false>> diagonals;
};

// One of the warps that sum along diagonals.
template <int kKeys>
__device__ void sum_table(const BackwardParams& params, Diagonals<kKeys, false>& diagonals,
                          const Block& block, KeyTiles<kKeys> tiles, int summer, int lane) {
    const int largest = block.head.position(block.first) + kBlockRows - 1 - tiles.first_key(0);
    Stage<Diagonals<kKeys, false>::kStages> stage;
    diagonals.sum(Slot(params, block), stage, tiles.count, largest, summer, lane);
}

template <class Tile, class Form, bool kTrained, class Shared>
__device__ void accumulate_over_keys(const BackwardParams& params, Shared& shared,
                                     const Block& block, KeyTiles<Tile::kKeys> tiles, Place place) {
    using Element = typename Tile::Element;
    const bool leads_warp = place.thread % 32 == 0;
    const Head& head = block.head;
    const int first = head.first_query + block.first, count = head.n_query - block.first;
    Logits<Element, Tile::kKeys, Form> logits(block, place);
    QueryGradient gradients[2];
    float lse[2], delta[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = place.row(r);
        const bool exists = row < count;
        lse[r] = exists ? *params.lse_in_base_2.at(head.b, head.h, first + row) : kInfinity;
        delta[r] = exists ? *params.delta.at(head.b, head.h, first + row) : 0;
    }
    float s[Tile::kKeys / 2], grad_s[Tile::kKeys / 2], dq[Tile::kHeadDim / 2];
    uint32_t rounded[Tile::kKeys / 4];
#pragma unroll
    for (float& x : dq) x = 0;

    if (tiles.count > 0) {
        typename BackwardShared<Tile>::Place stage, previous;
        Stage<Diagonals<Tile::kKeys, false>::kStages> diagonals_stage;

        const auto multiply_tile = [&] {
            shared.ring.wait_until_full(stage);
            multiply_channels(shared, stage.index, place, s);
            multiply_values(shared, stage.index, place, grad_s);
        };
        const auto accumulate = [&] {
            fence_products(rounded, dq);
            multiply_columns<Element, Tile::kHeadDim, Tile::kKeys>(
                dq, rounded, describe(shared.channels[previous.index], Tile::kKeys * kRowBytes),
                true);
            commit_products();
        };
        const auto differentiate = [&](int n) {
            const float* numbers = shared.numbers[stage.index];
            const int j = tiles.first_key(n);
            logits.complete(s, numbers, j);
            for_each_sum<Tile::kKeys>([&](int n, int r, int) {
                const float p = exp2_approximate(s[n] * logits.multiplier - lse[r]);
                grad_s[n] = p * (grad_s[n] - delta[r]);
                // Rows of padding may contain NaN, and share diagonals with those of the sequence.
                if (kTrained && Form::kTrainsTable && lse[r] == kInfinity) grad_s[n] = 0;
            });
            if constexpr (kTrained) logits.add_gradients(gradients, grad_s, numbers, j);
            if constexpr (kTrained && Form::kTrainsTable) {
                shared.diagonals.add(diagonals_stage, place, grad_s);
                diagonals_stage.advance();
            }
        };

        shared.own_full.wait(0);
        multiply_tile();
        wait_products<0>(s, grad_s);
        differentiate(0);
        round_to<Element>(rounded, grad_s);
#pragma unroll 1
        for (int n = 1; n < tiles.count; ++n) {
            previous = stage;
            stage.advance();
            multiply_tile();
            accumulate();
            wait_products<1>(s, grad_s);
            differentiate(n);
            wait_products<0>(dq, rounded);
            __syncwarp();
            if (leads_warp) shared.ring.release(previous);
            round_to<Element>(rounded, grad_s);
        }
        previous = stage;
        accumulate();
        wait_products<0>(dq, rounded);
    }
    const float scale[2] = {params.problem.scale, params.problem.scale};
    multiply(dq, scale);
    store_rows(shared.own_channels, dq,
               {params.grad_q, head.b, head.h, first, count, params.head_dim}, place);
    if constexpr (kTrained && Form::kTrainsGain) {
        const float sums[2] = {gradients[0].gain, gradients[1].gain};
        store_sums(params.grad_gain.at(head.b, head.h, first), place, count, sums);
    }
    if constexpr (kTrained && WarpQueries<Form, Element>::kExists) {
        const auto& gradient = params.grad_query_vectors;
        logits.queries.store_gradient(gradient.at(head.b, head.h, first), gradient.row, place,
                                      count);
    }
    if constexpr (kTrained && Form::kTrainsSums) {
        const float sums[2] = {gradients[0].sum, gradients[1].sum};
        store_sums(params.grad_query_sums.at(head.b, head.h, first), place, count, sums);
    }
}

template <class Tile, class Form, bool kTrained, int kSharedBytes>
__global__ void __launch_bounds__(3 * kGroupThreads, 1)
    attn_bwd_dq_kernel(const __grid_constant__ BackwardParams params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    constexpr bool kTrainsTable = kTrained && Form::kTrainsTable;
    using Shared = QueryShared<Tile, kTrainsTable>;
    static_assert(sizeof(Shared) <= kSharedBytes);
    static_assert(Form::template kNumbers<Tile::kKeys> <= Tile::kNumbers);
    auto& shared = *reinterpret_cast<Shared*>(memory);
    constexpr bool kHasNumbers = Form::template kNumbers<Tile::kKeys> > 0;

    const Program program(params.problem, params.problem.heads, blockIdx.x, gridDim.x);
    const Head head(params.problem, program.b, program.h);
    const Block block{params.problem, params.bias, head, program.block * kBlockRows, kBlockRows};
    if (block.first >= head.n_query) return;  // a sequence that is shorter than others
    const KeyTiles<Tile::kKeys> tiles(block);
    if constexpr (kTrainsTable) shared.diagonals.init();
    if (threadIdx.x == 0) shared.init(kHasNumbers);
    __syncthreads();

    const int group = int(threadIdx.x) / kGroupThreads, warp = int(threadIdx.x) / 32;
    const int lane = int(threadIdx.x) % 32;
    if (group > 0) {
        claim_registers<kConsumerRegisters<2>>();
        accumulate_over_keys<Tile, Form, kTrained>(params, shared, block, tiles,
                                                   {group - 1, int(threadIdx.x) % kGroupThreads});
        return;
    }
    release_registers<kProducerRegisters<2>>();
    if (warp == 0 && tiles.count > 0) {
        Copier<Tile> copier(shared, lane);
        copier.copy_own(params.q, params.grad_o, head.first_query + block.first, head.h, head.entry,
                        head.n_query - block.first, params.problem.sequences);
        for (int n = 0; n < tiles.count; ++n) {
            const int j = tiles.first_key(n);
            copier.copy_tile(params.k, params.v, head.first_key + j, head.kv_head, head.entry,
                             head.n_key - j, params.problem.sequences);
        }
    }
    if constexpr (kHasNumbers) {
        typename BackwardShared<Tile>::Place stage;
        for (int n = 0; warp == 1 && n < tiles.count; ++n, stage.advance()) {
            shared.ring.wait_until_empty(stage);
            Form::template stage<Tile::kKeys>(block, tiles.first_key(n),
                                              shared.numbers[stage.index], lane);
            __syncwarp();
            if (lane == 0) shared.ring.full(stage).arrive();
        }
    }
    if constexpr (kTrainsTable) {
        const int summer = warp - kFirstSummer;
        if (summer >= 0 && summer < shared.diagonals.kSummers && tiles.count > 0)
            sum_table(params, shared.diagonals, block, tiles, summer, lane);
    }
}

}  // namespace bfa::cuda
