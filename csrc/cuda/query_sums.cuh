// Sums over keys, to which blocks of keys add in turn: dq, and gradients of the queries' operands.
//
// A tile of queries has a turn, so that the order of additions, that of the keys, does not depend
// on when blocks run. Blocks take their keys in the order in which they start, so that those which
// a block waits for have started.
#pragma once

#include "query_tiles.cuh"

namespace bfa::cuda {

constexpr int kTileQueries = 64;

// Of a tile. Both warp groups have dq of all its queries, for half of the channels. Each thread has
// fours of them, and each four is next to those of other threads. Gains that are all 1 have no
// gradient: theirs is not read.
template <int kHeadDim, bool kHasSums>
struct QuerySums {
    float dq[2][kHeadDim / 16][kGroupThreads][4];
    float prefix_sums[kTileQueries], gains[kTileQueries];
};

template <int kHeadDim>
struct QuerySums<kHeadDim, false> {
    float dq[2][kHeadDim / 16][kGroupThreads][4];
};

// The number of a tile among those of all heads. Sequences share none.
__device__ inline int64_t tile_number(const BackwardParams& params, const Head& head, int i) {
    const int of_sequence = head.first_query / kTileQueries + (params.problem.packed ? head.b : 0);
    const int64_t row = int64_t(head.entry) * params.problem.heads + head.h;
    return row * params.tiles + of_sequence + i / kTileQueries;
}

// The warp that adds the sums of a block to those of earlier keys; one of its lanes calls these.
template <class Sums>
class Adder {
public:
    __device__ Adder(const BackwardParams& params, Sums& sums, Ring<1>& ring)
        : params_(params), sums_(sums), ring_(ring) {}

    // For all tiles of a head, the last one first.
    __device__ void add(const Block& block, QueryTiles<kTileQueries> tiles) {
        Block before = block;
        before.first = maximum(0, block.first - kBlockRows);
        const QueryTiles<kTileQueries> earlier(before);
        for (int n = tiles.count - 1; n >= 0; --n, stage_.advance()) {
            const int i = tiles.first_query(n);
            const int64_t number = tile_number(params_, block.head, i);
            const bool is_first = block.first == 0 || !earlier.contains(i);
            add_tile(static_cast<Sums*>(params_.query_sums) + number, params_.turns + number,
                     block.first / kBlockRows, is_first);
        }
    }

private:
    // turn: of this block. A tile that has not been written yet has no turn.
    __device__ void add_tile(Sums* to, int32_t* turns, int turn, bool is_first) {
        ring_.wait_until_full(stage_);
        if (is_first) {
            store_bytes(to, &sums_, sizeof(Sums));
        } else {
            int now;
            while ((now = load_acquire(turns)) != turn) {
                // Sequences whose rows overlap, which is an error of the caller's offsets.
                if (now > turn) __trap();
            }
            fence_copies();
            add_floats(to, &sums_, sizeof(Sums));
        }
        commit_copies();
        wait_until_read();
        ring_.release(stage_);
        wait_until_written();
        store_release(turns, turn + 1);
    }

    const BackwardParams& params_;
    Sums& sums_;
    Ring<1>& ring_;
    Stage<1> stage_;
};

}  // namespace bfa::cuda
