// The relative bias for the keys of a warp, whose rows are keys and whose columns are queries.
//
// For eight queries from i_0 on, the warp multiplies the vectors of the distances of its 16 keys
// from j_0 on and those of the queries:
//
//     E[x, c] = P[7 + p_0 - j_0 - x] . U_c,   b of row r and column c = E[r + 7 - c, c]
//
// with the position p_0 of i_0. So column c is to be shifted by 7 - c: within the eight lanes that
// share a column, with a carry to the next eight rows.
#pragma once

#include "forms/relative.cuh"
#include "tiles.cuh"

namespace bfa::cuda {

template <int kRank, class Element>
class WarpKeys<forms::Relative<kRank>, Element> {
    using Form = forms::Relative<kRank>;

public:
    static constexpr bool kExists = true;

    __device__ WarpKeys(const Block& block, Place place) : block_(block) {
        const int lane = place.thread % 32, g = lane / 4;
        row_ = place.row(0) - g;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int column = place.column() + e;
            carries_[e] = g + column + 1 < 8;
            source_[e] = (g + 7 - column) % 8 * 4 + lane % 4;
        }
    }

    // Whether the bias of these keys may differ from 0 for queries i, i + 1, ...
    template <int kQueries>
    __device__ bool may_differ(int i) const {
        const int smallest = block_.head.position(i) - (block_.first + row_ + kRows - 1);
        const int first = Form::column(block_, smallest);
        return __any_sync(~0u, Form::may_differ(block_.bias, first, kRows + kQueries - 1));
    }

    // Replaces s by scale s + b.
    template <int kQueries>
    __device__ void add(float (&s)[kQueries / 2], float scale, const float* numbers) const {
        const uint32_t lane = threadIdx.x % 32;
        const uint32_t distances = shared_address(numbers) + row_ * 32 + Form::offset_of_rows(lane);
        const uint32_t queries = shared_address(numbers + Form::template kNumbers<kQueries>) +
                                 Form::offset_of_lane(lane);
#pragma unroll
        for (int n = 0; n < kQueries / 8; n += 2) {
            __syncwarp();
            float products[2][2][4] = {};
#pragma unroll
            for (int k = 0; k < kRank / 16; ++k) {
                uint32_t b[4];
                load_matrices(b, queries + Form::template offset<kQueries>(8 * n, 2 * k));
#pragma unroll
                for (int m = 0; m < 2; ++m) {
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        constexpr int kStaged = kPlanQueries + kQueries;
                        const int row = kQueries - 8 * (n + m + 1) + 16 * half;
                        uint32_t a[4];
                        load_matrices(a, distances + Form::template offset<kStaged>(row, 2 * k));
                        multiply_add<Element>(products[m][half], a[0], a[1], a[2], a[3], b[2 * m],
                                              b[2 * m + 1]);
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const auto& of_column = products[m];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float* sums = s + 4 * (n + m) + e;
                    sums[0] = sums[0] * scale + shifted(e, of_column[0][e], of_column[0][2 + e]);
                    sums[2] = sums[2] * scale + shifted(e, of_column[0][2 + e], of_column[1][e]);
                }
            }
        }
    }

private:
    static constexpr int kRows = 16;

    // The product that belongs to this lane's row. A lane has products of two groups of eight rows,
    // of which its only reader needs one.
    __device__ float shifted(int parity, float own, float next) const {
        return __shfl_sync(~0u, carries_[parity] ? next : own, source_[parity]);
    }

    const Block& block_;
    int row_;  // the first one of the warp
    bool carries_[2];
    int source_[2];
};

}  // namespace bfa::cuda
