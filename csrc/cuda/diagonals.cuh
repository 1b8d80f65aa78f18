// Sums of dS along the diagonals of tiles: the gradient of a table of distances.
//
// Warps of the producer group that have nothing to copy sum the tiles that the others compute. With
// n keys per tile, the 128 queries of a block have 127 + n distances from them. The next tile adds
// to 127 of these, so that n are complete after each tile.
#pragma once

#include "backward_tiles.cuh"

namespace bfa::cuda {

constexpr int kFirstSummer = 2;  // the first of these warps

// dS of a tile, where a thread has added its elements of rows r and r + 8 of the same distance. So
// a warp has 8 rows, and 8 columns more than the tile. Zeros on either side of a row belong to no
// pair; they also keep the rows of pairs of numbers that a half-warp writes in different banks.
template <int kKeys>
class Diagonals {
public:
    static constexpr int kStages = 2;
    static constexpr int kSummers = kKeys / 32;  // of whose lanes each has one distance of n

    // All threads of the block call it, and then a barrier of the block.
    __device__ void init() {
        float* x = terms_[0][0];
        for (int n = threadIdx.x; n < int(sizeof(terms_) / sizeof(float)); n += blockDim.x)
            x[n] = 0;
        if (threadIdx.x == 0) ring_.init(kConsumerWarps, kSummers);
    }

    // For a warp that has computed dS of its 16 queries.
    __device__ void add(Stage<kStages> stage, Place place, const float (&grad_s)[kKeys / 2]) {
        const int lane = place.thread % 32, warp = place.group * 4 + place.thread / 32;
        float* row = terms_[stage.index][warp] + lane / 4 * kRow + kMargin + place.column();
        ring_.wait_until_empty(stage);
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
            float sum[2] = {0, 0};
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                if (n > 0) sum[c] += grad_s[4 * (n - 1) + c];
                if (8 * n < kKeys) sum[c] += grad_s[4 * n + 2 + c];
            }
            *reinterpret_cast<float2*>(row + 8 * n) = {sum[0], sum[1]};
        }
        __syncwarp();
        if (lane == 0) ring_.full(stage).arrive();
    }

    // For each summing warp: adds the sums of a block's `count` tiles to a table. f(d) returns the
    // address of the sum of distance d, or null. largest: the distance of the last query of the
    // block to the first key of the first tile.
    template <class Function>
    __device__ void sum(int count, int largest, int summer, int lane, Function f) {
        constexpr int kSpan = kBlockRows / kKeys + 1;  // tiles with a common distance
        Stage<kStages> stage;
        float sums[kSpan] =
            {};  // of the distances that are complete after this tile, the next, ...
        const auto replace_first = [&](float last) {
#pragma unroll
            for (int span = 0; span < kSpan - 1; ++span) sums[span] = sums[span + 1];
            sums[kSpan - 1] = last;
        };
        for (int n = 0; n < count + kSpan - 1; ++n) {
            if (n < count) {
                ring_.wait_until_full(stage);
#pragma unroll 1
                for (int span = 0; span < kSpan; ++span) {
                    const int first = span * kKeys + summer * 32;
                    replace_first(sums[0] + sum_of(stage.index, first, lane));
                }
                __syncwarp();
                if (lane == 0) ring_.release(stage);
                stage.advance();
            }
            float* sum = f(largest - n * kKeys - summer * 32 - lane);
            if (sum) *sum += sums[0];
            replace_first(0);
        }
    }

private:
    static constexpr int kRows = 8, kMargin = 8;
    static constexpr int kColumns = kKeys + kRows, kRow = kColumns + 2 * kMargin;
    static constexpr int kDiagonals = kKeys + 15;  // of a warp

    // The sum of diagonal first + lane of a tile, counted from the one with the largest distance.
    __device__ float sum_of(int stage, int first, int lane) const {
        // The computing warps that have some of the 32 diagonals, from the last one on.
        const int begin = first < kDiagonals ? 0 : (first - kDiagonals) / 16 + 1;
        const int end = minimum(kConsumerWarps, (first + 31) / 16 + 1);
        float sum = 0;
#pragma unroll 2
        for (int n = begin; n < end; ++n) {
            const int diagonal = first + lane - 16 * n;  // of the warp
            const bool exists = 0 <= diagonal && diagonal < kDiagonals;
            const float* terms = terms_[stage][kConsumerWarps - 1 - n] + kMargin - kRows + 1;
            float x[kRows];
#pragma unroll
            for (int row = 0; row < kRows; ++row)
                x[row] = exists ? terms[diagonal + row * (kRow + 1)] : 0;
            // In a tree, as each addition waits for the one before.
            sum += ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
        }
        return sum;
    }

    alignas(16) float terms_[kStages][kConsumerWarps][kRows * kRow];
    Ring<kStages> ring_;
};

}  // namespace bfa::cuda
