// b = U_i . P[d], with a vector U of the query, and a vector P of the distance.
//
// Warps multiply the vectors of a tile and move the products to their pairs: relative_queries.cuh
// and relative_keys.cuh.
#pragma once

#include "forms/none.cuh"
#include "warp_matrices.cuh"

namespace bfa::cuda {

namespace forms {

// kRank: the padded number of channels of a vector. Those of a tile are in shared memory in the
// order of decreasing distances. Pair by pair there is no
// bias: this is for tiles that are wholly beyond the vectors of distances.
template <int kRank_>
struct Relative : None {
    static constexpr bool kExists = true;
    static constexpr int kRank = kRank_, kChunks = kRank / 8;
    template <int kColumns>
    static constexpr int kNumbers = (kPlanQueries + kColumns) * kRank / 2;
    template <int kColumns>
    static constexpr int kNumbersOfQueries = kNumbers<kColumns> + kColumns * kRank / 2;

    // Whether the bias may differ from 0 in columns first, ..., first + count - 1.
    static __device__ bool may_differ(const Bias& bias, int first, int count) {
        return bias.extends || (first + count > 0 && first < bias.columns);
    }
    // The column of a distance.
    static __device__ int column(const Block& block, int distance) {
        return distance + (block.problem.causal ? 0 : block.bias.columns / 2);
    }
    template <int kKeys>
    static __device__ void stage(const Block& block, int j, float* numbers, int lane) {
        const int largest = block.head.position(block.first) + kPlanQueries - 1 - j;
        stage_distances<kPlanQueries + kKeys>(block, largest, numbers, lane);
        wait_copies();
    }
    // The vectors of queries follow those of distances.
    template <int kQueries>
    static __device__ void stage_queries(const Block& block, int i, float* numbers, int lane) {
        const int largest = block.head.position(i) + kQueries - 1 - block.first;
        stage_distances<kPlanQueries + kQueries>(block, largest, numbers, lane);
        auto* to = reinterpret_cast<char*>(numbers + kNumbers<kQueries>);
        const Head& head = block.head;
        const auto& vectors = block.bias.query_vectors;
        const int chunk = lane % kChunks;
#pragma unroll 1
        for (int n = lane / kChunks; n < kQueries; n += 32 / kChunks) {
            const bool exists = i + n < head.n_query;
            const int64_t row = head.first_query + i + (exists ? n : 0);
            const auto* from = vectors.template at<const uint16_t>(head.b, head.h, row);
            copy_chunk(to + offset<kQueries>(n, chunk), from + 8 * chunk, exists);
        }
        wait_copies();
    }

    // The bytes before a chunk of 16 bytes of a vector, of kRows in shared memory. Two chunks, 16
    // channels, of all vectors are consecutive, and exchanged in every other four of them to avoid
    // bank conflicts.
    template <int kRows>
    static __device__ constexpr uint32_t offset(uint32_t row, uint32_t chunk) {
        return (chunk / 2 * kRows + row) * 32 + (chunk ^ row / 4) % 2 * 16;
    }
    // What a lane adds to an offset for `load_matrices` to load two chunks of 16 rows: both chunks
    // of rows 0 to 7 and then those of the others, as of two right operands of a product.
    static __device__ uint32_t offset_of_lane(uint32_t lane) {
        return offset<1>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    }
    // The same for all rows of one chunk before those of the other, as of a left operand.
    static __device__ uint32_t offset_of_rows(uint32_t lane) {
        return offset<1>(lane % 16, lane / 16);
    }

private:
    // Writes the vectors of distances largest, largest - 1, ...
    template <int kRows>
    static __device__ void stage_distances(const Block& block, int largest, float* numbers,
                                           int lane) {
        const Bias& bias = block.bias;
        const int end = column(block, largest) + 1;
        if (!may_differ(bias, end - kRows, kRows)) return;
        const int chunk = lane % kChunks;
        const auto* vectors =
            bias.distance_vectors.template at<const uint16_t>(0, block.head.h) + 8 * chunk;
#pragma unroll 1
        for (int row = lane / kChunks; row < kRows; row += 32 / kChunks) {
            const int n = end - 1 - row, nearest = minimum(maximum(n, 0), bias.columns - 1);
            copy_chunk(reinterpret_cast<char*>(numbers) + offset<kRows>(row, chunk),
                       vectors + nearest * bias.distance_vectors.row, n == nearest || bias.extends);
        }
    }
};

}  // namespace forms

}  // namespace bfa::cuda
