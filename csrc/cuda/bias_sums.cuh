// The gradients of prefix sums and gains, from dS as the products for dq and dk read it: sums over
// keys and over queries, which cancel where they should.
//
// Warps of the producer group that have nothing to copy compute these as products: of dS with the
// numbers of keys or of queries, split into three of the operands' type. Fragments have the order
// of warp_matrices.cuh. These warps have few registers, so they keep some numbers of each lane in
// shared memory.
#pragma once

#include "query_sums.cuh"
#include "warp_matrices.cuh"

namespace bfa::cuda {

constexpr int kLimbs = 3;

// Limb n of x, which is nearly the sum of all; 0 if there is none.
template <class Element>
__device__ float limb(float x, int n) {
    float found = 0;
#pragma unroll
    for (int m = 0; m < kLimbs; ++m) {
        const float rounded = Element{uint16_t(Element::pair(x, 0))}.value();
        if (m == n) found = rounded;
        x -= rounded;
    }
    return found;
}

// dS^T of a tile, which the warp groups write and read again as an operand.
template <class Element>
using GradLogits = Element[kBlockRows][kTileQueries];

template <class T, int kCount>
using OfLanes = T[kCount][32];

// Sums of a tile over keys. A warp computes them for all queries.
template <class Element, class Form>
class SumsOverKeys {
    static constexpr int kSteps = kBlockRows / kDepth;

public:
    using Weights = OfLanes<uint2, kSteps>;

    // The whole warp calls these.
    __device__ SumsOverKeys(const Block& block, Weights& weights, int lane)
        : block_(block), weights_(weights), lane_(lane), nearest_(Form::nearest_key(block)) {
        const int end = block.head.n_key;
#pragma unroll 1
        for (int n = 0; n < kSteps; ++n) {
            float w[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int key = block.first + n * kDepth + lane % 4 * 2 + c % 2 + c / 2 * 8;
                const float of_key =
                    key < end ? Form::difference(nearest_, Form::key(block, key)) : 0;
                w[c] = weight(of_key);
            }
            weights[n][lane] = {Element::pair(w[0], w[1]), Element::pair(w[2], w[3])};
        }
    }

    // Calls wait() before it writes.
    template <class Sums, class Function>
    __device__ void sum(Sums& sums, const GradLogits<Element>& grad_s,
                        TileNumbers<kTileQueries>& tile, Function wait) const {
        constexpr int kBlocks = kTileQueries / 16;
        const float* numbers = tile.of_form;
        float d[kBlocks][4] = {};
#pragma unroll 2
        for (int n = 0; n < kSteps; ++n) {
            const uint2 b = weights_[n][lane_];
            const int key = n * kDepth + lane_ % 8 + lane_ / 16 * 8;
#pragma unroll
            for (int m = 0; m < kBlocks; ++m) {
                uint32_t a[4];
                const int chunk = 2 * m + lane_ / 8 % 2;
                load_matrices<true>(a, shared_address(&grad_s[key][(chunk ^ key % 8) * 8]));
                multiply_add<Element>(d[m], a[0], a[1], a[2], a[3], b.x, b.y);
            }
        }
        wait();
#pragma unroll
        for (int n = 0; n < 2 * kBlocks; ++n) {
            const float* pair = d[n / 2] + n % 2 * 2;
            const int row = n * 8 + lane_ / 4;
            const auto query = Form::query_at(numbers, row);
            // Column 0 has the sum of dS, the others those of its products with limbs.
            const float sum = __shfl_sync(~0u, pair[0], lane_ / 4 * 4);
            const float own = lane_ % 4 == 0 ? pair[1] : pair[0] + pair[1];
            const float rest = over_row(own, [](float a, float b) { return a + b; });
            if (lane_ % 4 > 0) continue;
            sums.prefix_sums[row] = query.gain * sum;
            sums.gains[row] = Form::difference(query, nearest_) * sum + rest;
        }
        const auto& separated = SeparatedNumbers<kTileQueries>::template of<Form>(tile);
        if (!Form::kTrainsGain || separated.side != 0) return;
        __syncwarp();
        sum_gains(sums, grad_s, numbers);
    }

private:
    // Of the column of this lane.
    __device__ float weight(float of_key) const {
        const int column = lane_ / 4;
        if (column == 0) return 1;
        return Form::kTrainsGain ? limb<Element>(of_key, column - 1) : 0;
    }
    // Pair by pair: rounding large differences would affect the sums of small ones. A lane has two
    // queries.
    template <class Sums>
    __device__ void sum_gains(Sums& sums, const GradLogits<Element>& grad_s,
                              const float* numbers) const {
        const int count = minimum(kBlockRows, block_.head.n_key - block_.first);
        const int column = lane_ % 4 * 2, chunk = lane_ / 4;
        const typename Form::Query queries[2] = {Form::query_at(numbers, 2 * lane_),
                                                 Form::query_at(numbers, 2 * lane_ + 1)};
        float gains[2] = {0, 0};
#pragma unroll 4
        for (int n = 0; n < count; ++n) {
            const auto key = Form::key(block_, block_.first + n);
            const Element* pair = &grad_s[n][(chunk ^ n % 8) * 8 + column];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float x = pair[c].value();
                // A masked pair may have an infinite difference.
                gains[c] += x == 0 ? 0 : x * Form::difference(queries[c], key);
            }
        }
#pragma unroll
        for (int c = 0; c < 2; ++c) sums.gains[2 * lane_ + c] = gains[c];
    }

    const Block& block_;
    Weights& weights_;
    const int lane_;
    typename Form::Key nearest_;
};

// Sums over queries, for all keys of the block.
template <class Element, class Form>
class SumsOverQueries {
    static constexpr int kBlocks = kBlockRows / 16;

public:
    using Sums = OfLanes<float2, kBlocks>;  // of rows r and r + 8

    __device__ SumsOverQueries(Sums& sums, int lane) : sums_(sums), lane_(lane) {
        for (auto& of_lanes : sums) of_lanes[lane] = {0, 0};
    }

    // For each tile.
    __device__ void add(const GradLogits<Element>& grad_s, const TileNumbers<kTileQueries>& tile) {
        const float* numbers = tile.of_form;
        const float unit = Form::kTrainsGain ? unit_of_gains(numbers) : 1;
        const float inverse = __uint_as_float(0x7F000000 - __float_as_uint(unit));
        uint32_t weights[kTileQueries / 8];
#pragma unroll
        for (int n = 0; n < kTileQueries / 8; ++n) {
            float w[2];
#pragma unroll
            for (int c = 0; c < 2; ++c)
                w[c] = weight(Form::query_at(numbers, n * 8 + lane_ % 4 * 2 + c).gain * inverse);
            weights[n] = Element::pair(w[0], w[1]);
        }
#pragma unroll 1
        for (int m = 0; m < kBlocks; m += 2) {
            float d[2][4] = {};  // of two blocks, which need not wait for each other
#pragma unroll
            for (int i = 0; i < kTileQueries; i += kDepth) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    uint32_t a[4];
                    load_fragment(a, grad_s, (m + n) * 16, i, lane_);
                    multiply_add<Element>(d[n], a[0], a[1], a[2], a[3], weights[i / 8],
                                          weights[i / 8 + 1]);
                }
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                float2& sum = sums_[m + n][lane_];
                sum.x += unit * (d[n][0] + d[n][1]);
                sum.y += unit * (d[n][2] + d[n][3]);
            }
        }
    }
    // Writes the gradients of the prefix sums at `count` keys.
    __device__ void store(float* to, int count) const {
#pragma unroll 1
        for (int m = 0; m < kBlocks; ++m) {
            const float of_rows[2] = {sums_[m][lane_].x, sums_[m][lane_].y};
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float sum = over_row(of_rows[r], [](float a, float b) { return a + b; });
                const int key = m * 16 + lane_ / 4 + 8 * r;
                if (lane_ % 4 == 0 && key < count) to[key] = -sum;
            }
        }
    }

private:
    // A power of 2, relative to which gains have a magnitude below 2.
    __device__ float unit_of_gains(const float* numbers) const {
        float largest = 1e-30f;
#pragma unroll
        for (int i = lane_; i < kTileQueries; i += 32)
            largest = fmaxf(largest, fabsf(Form::query_at(numbers, i).gain));
#pragma unroll
        for (int n = 16; n > 0; n /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, n));
        return __uint_as_float(__float_as_uint(largest) & 0x7F800000);
    }
    // Of the column of this lane.
    __device__ float weight(float gain) const {
        const int column = lane_ / 4;
        if constexpr (!Form::kTrainsGain) return column == 0 ? 1 : 0;
        return limb<Element>(gain, column);
    }

    Sums& sums_;
    const int lane_;
};

}  // namespace bfa::cuda
