// Sums of dS along the diagonals of tiles: the gradient of a table of distances.
//
// Warps of the producer group that have nothing to copy sum the tiles that the others compute. With
// n columns of a tile, the 128 rows of a block have 127 + n distances from them. The next tile adds
// to 127 of these, so that n are complete after each tile. Distances decrease from tile to tile.
#pragma once

#include "backward_tiles.cuh"
#include "forms/distance.cuh"

namespace bfa::cuda {

constexpr int kFirstSummer = 2;  // the first of these warps

// The sums of a slot, to which a block adds: see table_gradient.py.
class Slot {
public:
    __device__ Slot(const BackwardParams& params, const Block& block)
        : own_(distances(params.problem)) {
        const Head& head = block.head;
        const int batch_index = params.grad_table.batch ? 0 : head.b;  // in the same slots
        const int number = batch_index * params.problem.blocks + block.first / kBlockRows;
        sums_ = params.grad_table.at(head.b, head.h, number % params.slots);
    }
    // The address of the sum of a distance, or null.
    __device__ float* at(int d) const {
        return own_.contains(d) ? sums_ + (d - own_.begin) : nullptr;
    }

private:
    Range own_;
    float* sums_;
};

// dS of a tile, where a thread has added its elements of rows r and r + 8 of the same distance. So
// a warp has 8 rows, and 8 columns more than the tile. Zeros on either side of a row belong to no
// pair; they also keep the rows of pairs of numbers that a half-warp writes in different banks.
// kRowsAreKeys: else they are queries. Their order is reversed, and that of the columns, such that
// the first diagonal always has the largest distance.
template <int kTileColumns, bool kRowsAreKeys>
class Diagonals {
public:
    static constexpr int kStages = 2;
    static constexpr int kSummers = kTileColumns / 32;  // of whose lanes each has one distance

    // All threads of the block call it, and then a barrier of the block.
    __device__ void init() {
        float* x = terms_[0][0];
        for (int n = threadIdx.x; n < int(sizeof(terms_) / sizeof(float)); n += blockDim.x)
            x[n] = 0;
        if (threadIdx.x == 0) ring_.init(kConsumerWarps, kSummers);
    }

    // For a warp that has computed dS of its 16 rows.
    __device__ void add(Stage<kStages> stage, Place place,
                        const float (&grad_s)[kTileColumns / 2]) {
        const int lane = place.thread % 32, warp = place.group * 4 + place.thread / 32;
        float* row = terms_[stage.index][kRowsAreKeys ? kConsumerWarps - 1 - warp : warp] + kMargin;
        row += kRowsAreKeys ? (kRows - 1 - lane / 4) * kRow + kColumns - 2 - place.column()
                            : lane / 4 * kRow + place.column();
        ring_.wait_until_empty(stage);
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
            float sum[2] = {0, 0};
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                if (n > 0) sum[c] += grad_s[4 * (n - 1) + c];
                if (8 * n < kTileColumns) sum[c] += grad_s[4 * n + 2 + c];
            }
            if constexpr (kRowsAreKeys) {
                *reinterpret_cast<float2*>(row - 8 * n) = {sum[1], sum[0]};
            } else {
                *reinterpret_cast<float2*>(row + 8 * n) = {sum[0], sum[1]};
            }
        }
        __syncwarp();
        if (lane == 0) ring_.full(stage).arrive();
    }

    // For each summing warp: adds the sums of the next `count` tiles to a slot. largest: the
    // largest distance of the first tile.
    __device__ void sum(const Slot& slot, Stage<kStages>& stage, int count, int largest, int summer,
                        int lane) {
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
                    const int first = span * kTileColumns + summer * 32;
                    replace_first(sums[0] + sum_of(stage.index, first, lane));
                }
                __syncwarp();
                if (lane == 0) ring_.release(stage);
                stage.advance();
            }
            float* sum = slot.at(largest - n * kTileColumns - summer * 32 - lane);
            if (sum) *sum += sums[0];
            replace_first(0);
        }
    }

private:
    static constexpr int kSpan = kBlockRows / kTileColumns + 1;  // tiles with a common distance
    static constexpr int kRows = 8, kMargin = 8;
    static constexpr int kColumns = kTileColumns + kRows, kRow = kColumns + 2 * kMargin;
    static constexpr int kDiagonals = kTileColumns + 15;  // of a warp

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
