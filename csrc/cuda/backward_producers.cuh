// The third group of the backward pass in one pass, each of whose warps has a task of its own.
#pragma once

#include "bias_sums.cuh"
#include "diagonals.cuh"

namespace bfa::cuda {

// Of a key head, and its keys of a block.
struct Keys {
    Head head;
    int first;

    __device__ int count() const { return head.n_key - first; }
    __device__ int64_t row() const { return head.first_key + first; }
};

// The warp that copies.
template <class Tile, class Form, class Shared>
__device__ void produce(const BackwardParams& params, Shared& shared, const Keys& keys, int lane) {
    static_assert(kNumbersOfTile<kTileQueries> + Form::template kNumbersOfQueries<kTileQueries> +
                      int(sizeof(SeparatedNumbers<kTileQueries>) / sizeof(float)) *
                          Form::kSeparates <=
                  Tile::kNumbers);
    const Head& head = keys.head;
    const bool sequences = params.problem.sequences;
    Copier<Tile> copier(shared, lane);
    copier.copy_own(params.k, params.v, keys.row(), head.kv_head, head.entry, keys.count(),
                    sequences);
    typename BackwardShared<Tile>::Place stage;
    for_each_head<Tile>(params, head, keys.first, [&](const Block& block, auto tiles) {
        const SeparatedQueries<Form, kTileQueries> separated(block, lane);
        for (int n = tiles.count - 1; n >= 0; --n, stage.advance()) {
            const int i = tiles.first_query(n);
            copier.copy_tile(params.q, params.grad_o, head.first_query + i, block.head.h,
                             head.entry, head.n_query - i, sequences);
            stage_numbers<Tile, Form>(params, shared, block, i, stage.index, lane);
            __syncwarp();
            separated.stage(TileNumbers<kTileQueries>::of(shared.numbers[stage.index]), i);
            __syncwarp();
            if (lane == 0) shared.ring.full(stage).arrive();
        }
    });
}

// The warps that sum dS along diagonals.
template <class Tile, class Shared>
__device__ void sum_table(const BackwardParams& params, Shared& shared, const Keys& keys,
                          int summer, int lane) {
    Stage<Shared::Table::kStages> stage;
    for_each_head<Tile>(params, keys.head, keys.first, [&](const Block& block, auto tiles) {
        const int last = tiles.first_query(tiles.count) - 1;
        shared.diagonals.sum(Slot(params, block), stage, tiles.count,
                             block.head.position(last) - block.first, summer, lane);
    });
}

// Calls f for each tile, when dS of it and its numbers are in shared memory.
template <class Tile, class Shared, class Tiles, class Function>
__device__ void with_grad_s(Shared& shared, const Tiles& tiles,
                            typename BackwardShared<Tile>::Place& stage,
                            Stage<Shared::kGradStages>& grad_s_stage, int lane, Function f) {
    for (int n = tiles.count - 1; n >= 0; --n, stage.advance(), grad_s_stage.advance()) {
        shared.ring.wait_until_full(stage);
        shared.grad_s_ring.wait_until_full(grad_s_stage);
        f(shared.grad_s[grad_s_stage.index],
          TileNumbers<kTileQueries>::of(shared.numbers[stage.index]));
        __syncwarp();
        if (lane == 0) {
            shared.grad_s_ring.release(grad_s_stage);
            shared.ring.release(stage);
        }
    }
}

// The warps that sum dS over keys, and over queries.
template <class Tile, class Form, class Shared>
__device__ void sum_over_keys(const BackwardParams& params, Shared& shared, const Keys& keys,
                              int lane) {
    typename BackwardShared<Tile>::Place stage;
    Stage<Shared::kGradStages> grad_s_stage;
    Stage<1> sums_stage;
    for_each_head<Tile>(params, keys.head, keys.first, [&](const Block& block, auto tiles) {
        const typename Shared::OverKeys over_keys(block, shared.scratch.weights, lane);
        with_grad_s<Tile>(shared, tiles, stage, grad_s_stage, lane,
                          [&](auto& grad_s, auto& numbers) {
                              over_keys.sum(shared.sums, grad_s, numbers,
                                            [&] { shared.sums_ring.wait_until_empty(sums_stage); });
                              fence_async_proxy();
                              __syncwarp();
                              if (lane == 0) shared.sums_ring.full(sums_stage).arrive();
                              sums_stage.advance();
                          });
    });
}

template <class Tile, class Form, class Shared>
__device__ void sum_over_queries(const BackwardParams& params, Shared& shared, const Keys& keys,
                                 int lane) {
    typename BackwardShared<Tile>::Place stage;
    Stage<Shared::kGradStages> grad_s_stage;
    for_each_head<Tile>(params, keys.head, keys.first, [&](const Block& block, auto tiles) {
        typename Shared::OverQueries over_queries(shared.scratch.sums, lane);
        with_grad_s<Tile>(shared, tiles, stage, grad_s_stage, lane,
                          [&](auto& grad_s, auto& numbers) { over_queries.add(grad_s, numbers); });
        const Head& head = block.head;
        over_queries.store(params.grad_key_sums.at(head.b, head.h, keys.row()), keys.count());
    });
}

}  // namespace bfa::cuda
