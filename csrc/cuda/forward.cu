// Forward: o_i = sum_j exp(s_ij - lse_i) v_j and lse_i = log sum_j exp(s_ij).
//
// A block computes 128 queries of a head, 64 in each of two warp groups. A third one copies tiles
// of keys and values to shared memory, where both groups read them:
//
//     for each key tile, the last one first:
//         s = q k^T
//         o = o + p v                     # p and v of the previous tile
//         s = scale s + bias, masked      # while o is computed, and the other group's products
//         p = online softmax of s
//         o = rescaled o
#include "forms/cumulative.cuh"
#include "forms/distance.cuh"
#include "forms/linear.cuh"
#include "forms/none.cuh"
#include "forms/relative_queries.cuh"
#include "logits.cuh"
#include "output.cuh"
#include "tiles.cuh"

namespace bfa::cuda {

template <class Tile>
struct Shared {
    using Element = typename Tile::Element;
    using Place = Stage<Tile::kStages>;
    // The outputs replace the queries.
    static constexpr int kWidth = maximum(Tile::kHeadDim, Tile::kValueDim);

    alignas(1024) Panels<Element, kWidth, kBlockRows> queries;
    alignas(1024) Panels<Element, Tile::kHeadDim, Tile::kKeys> keys[Tile::kStages];
    alignas(1024) Panels<Element, Tile::kValueDim, Tile::kKeys> values[Tile::kStages];
    alignas(128) float numbers[Tile::kStages][Tile::kNumbers];  // see forms/form.cuh
    Barrier query_full;
    Barrier own_values;  // the last tile of values, before rows of other sequences are cleared
    Ring<Tile::kStages> key_ring, value_ring;
};

// The first warp of the producer group: copies q, and then keys and values tile by tile.
template <class Tile>
__device__ void copy_tiles(const ForwardParams& params, Shared<Tile>& shared, const Head& head,
                           int first, KeyTiles<Tile::kKeys> tiles, int lane) {
    using Element = typename Tile::Element;
    const bool leads = lane == 0;
    if (leads) {
        shared.query_full.arrive_expecting(sizeof(Panels<Element, Tile::kHeadDim, kBlockRows>));
        auto& queries =
            reinterpret_cast<Panels<Element, Tile::kHeadDim, kBlockRows>&>(shared.queries);
        copy_rows<kBlockRows>(queries, params.q, shared.query_full, head.first_query + first,
                              head.h, head.entry);
    }
    typename Shared<Tile>::Place stage;
    for (int n = tiles.count - 1; n >= 0; --n, stage.advance()) {
        const int j = tiles.first_key(n), row = head.first_key + j;
        auto& keys = shared.keys[stage.index];
        auto& values = shared.values[stage.index];
        if (leads) {
            shared.key_ring.wait_until_empty(stage);
            Barrier& full = shared.key_ring.full(stage);
            full.arrive_expecting(sizeof(keys));
            copy_rows<Tile::kKeys>(keys, params.k, full, row, head.kv_head, head.entry);
        }
        // Rows after the end of a sequence may contain NaN, which a weight of 0 does not remove.
        const bool has_others = params.problem.sequences && j + Tile::kKeys > head.n_key;
        if (leads) {
            shared.value_ring.wait_until_empty(stage);
            Barrier& full = has_others ? shared.own_values : shared.value_ring.full(stage);
            full.arrive_expecting(sizeof(values));
            copy_rows<Tile::kKeys>(values, params.v, full, row, head.kv_head, head.entry);
        }
        __syncwarp();
        if (has_others) {
            shared.own_values.wait(0);  // only the last tile contains rows of others
            clear_rows(values, head.n_key - j, lane);
            fence_async_proxy();
            __syncwarp();
            if (leads) shared.value_ring.full(stage).arrive();
        }
    }
}

// The second warp of the producer group: provides the form's numbers of each tile with its keys.
template <class Tile, class Form>
__device__ void stage_numbers(Shared<Tile>& shared, const Block& block, KeyTiles<Tile::kKeys> tiles,
                              int lane) {
    typename Shared<Tile>::Place stage;
    for (int n = tiles.count - 1; n >= 0; --n, stage.advance()) {
        shared.key_ring.wait_until_empty(stage);
        Form::template stage<Tile::kKeys>(block, tiles.first_key(n), shared.numbers[stage.index],
                                          lane);
        __syncwarp();
        if (lane == 0) shared.key_ring.full(stage).arrive();
    }
}

template <class Tile, class Form>
__device__ void attend(const ForwardParams& params, Shared<Tile>& shared, const Block& block,
                       KeyTiles<Tile::kKeys> tiles, Place place) {
    using Element = typename Tile::Element;
    constexpr int kKeys = Tile::kKeys, kChannels = Tile::kHeadDim;
    const bool leads_warp = place.thread % 32 == 0;
    Logits<Element, kKeys, Form> logits(block, place);
    Softmax softmax;
    float s[kKeys / 2], o[Tile::kValueDim / 2], rescale[2];
    uint32_t p[kKeys / 4];
#pragma unroll
    for (float& x : o) x = 0;

    if (tiles.count > 0) {
        const uint64_t q = describe(shared.queries[0][place.group * kGroupRows]);
        typename Shared<Tile>::Place stage, previous;

        const auto multiply_keys = [&] {
            shared.key_ring.wait_until_full(stage);
            fence_products(s);
            multiply_rows<Element, kKeys, kChannels, kBlockRows, kKeys>(
                s, q, describe(shared.keys[stage.index]));
            commit_products();
        };
        const auto multiply_values = [&] {
            shared.value_ring.wait_until_full(previous);
            fence_products(p, o);
            multiply_columns<Element, Tile::kValueDim, kKeys>(
                o, p, describe(shared.values[previous.index], kKeys * kRowBytes), true);
            commit_products();
        };
        const auto add_to_softmax = [&](int n) {
            logits.complete(s, shared.numbers[stage.index], tiles.first_key(n));
            __syncwarp();
            if (leads_warp) shared.key_ring.release(stage);
            softmax.add(s, logits.multiplier, rescale);
        };

        Turns turns(place.group);
        shared.query_full.wait(0);
        turns.wait();
        multiply_keys();
        turns.pass();
        wait_products<0>(s);
        add_to_softmax(tiles.count - 1);
        round_to<Element>(p, s);
#pragma unroll 1
        for (int n = tiles.count - 2; n >= 0; --n) {
            previous = stage;
            stage.advance();
            turns.wait();
            multiply_keys();
            multiply_values();
            turns.pass();
            wait_products<1>(s);
            add_to_softmax(n);
            wait_products<0>(o, p);
            if (leads_warp) shared.value_ring.release(previous);
            multiply(o, rescale);
            round_to<Element>(p, s);
        }
        previous = stage;
        multiply_values();
        wait_products<0>(o, p);
        turns.finish();
    }
    softmax.finish();
    const float inverses[2] = {softmax.inverse(0), softmax.inverse(1)};
    multiply(o, inverses);
    const Head& head = block.head;
    const int first = head.first_query + block.first, count = head.n_query - block.first;
    store_rows(shared.queries, o, {params.o, head.b, head.h, first, count, params.value_dim},
               place);
    store_numbers(params.lse.at(head.b, head.h, first), place, count,
                  [&](int r) { return softmax.lse(r); });
}

template <class Tile, class Form, int kSharedBytes>
__global__ void __launch_bounds__(3 * kGroupThreads, 1)
    attn_fwd_kernel(const __grid_constant__ ForwardParams params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    static_assert(sizeof(Shared<Tile>) <= kSharedBytes);
    static_assert(Form::template kNumbers<Tile::kKeys> <= Tile::kNumbers);
    auto& shared = *reinterpret_cast<Shared<Tile>*>(memory);
    constexpr bool kHasNumbers = Form::template kNumbers<Tile::kKeys> > 0;

    const Program program(params.problem, params.problem.heads);
    const Head head(params.problem, program.b, program.h);
    const Block block{params.problem, params.bias, head, program.block * kBlockRows};
    if (block.first >= head.n_query) return;  // a sequence that is shorter than others
    const KeyTiles<Tile::kKeys> tiles(block);

    if (threadIdx.x == 0) {
        shared.query_full.init(1);
        shared.own_values.init(1);
        shared.key_ring.init(kHasNumbers ? 2 : 1, kConsumerWarps);
        shared.value_ring.init(1, kConsumerWarps);
        fence_barrier_init();
    }
    __syncthreads();

    const int group = int(threadIdx.x) / kGroupThreads, warp = int(threadIdx.x) / 32;
    const int lane = int(threadIdx.x) % 32;
    if (group == 0) {
        release_registers<kProducerRegisters>();
        if (tiles.count == 0) return;
        if (warp == 0) copy_tiles(params, shared, head, block.first, tiles, lane);
        if constexpr (kHasNumbers) {
            if (warp == 1) stage_numbers<Tile, Form>(shared, block, tiles, lane);
        }
    } else {
        claim_registers<kConsumerRegisters>();
        attend<Tile, Form>(params, shared, block, tiles,
                           {group - 1, int(threadIdx.x) % kGroupThreads});
    }
}

}  // namespace bfa::cuda
