// b = t[d], with a table t of the head.
#pragma once

#include "forms/form.cuh"

namespace bfa::cuda {

// The distances that a table has.
__device__ inline Range distances(const Problem& problem) {
    return {problem.causal ? 0 : 1 - problem.n_query,
            minimum(problem.n_key + problem.shift, problem.window)};
}

namespace forms {

// A tile reads one entry per diagonal. They are stored in base 2, such that the columns of a row
// read consecutive numbers.
struct Distance {
    static constexpr int kMostRows = 3 * 64;  // of a block
    static constexpr bool kExists = true, kHasSides = false;
    static constexpr bool kTrainsGain = false, kTrainsSums = false;
    static constexpr bool kTrainsTable = true;
    static constexpr bool kSeparates = false, kHasFactors = false;
    static constexpr bool kStarts = true;
    template <int kColumns>
    static constexpr int kNumbers = kMostRows + kColumns;
    template <int kKeys>
    static constexpr int kStartNumbers = kNumbers<kKeys>;
    template <int kColumns>
    static constexpr int kNumbersOfQueries = kNumbers<kColumns>;

    struct Query {
        int row;  // the number of the entry at column 0
    };
    using Key = Query;

    template <int kKeys>
    static __device__ void stage(const Block& block, int j, float* numbers, int lane) {
        stage_keys<kKeys>(block, j, 1, numbers, lane);
    }
    template <int kKeys>
    static __device__ void stage_start(const Block& block, int j, float* numbers, int lane) {
        stage_keys<kKeys>(block, j, 1 / (block.problem.scale * kLog2E), numbers, lane);
    }
    template <int kKeys>
    static __device__ int side(const Block&, int, const float*) {
        return 1;
    }
    struct Start {
        const float* entries;

        __device__ float at(int n) const { return entries[n]; }
    };
    template <int kKeys>
    static __device__ Start start(const Query& query, const float* numbers, int column, float,
                                  float, float) {
        return {numbers + query.row + column};
    }
    template <int kQueries>
    static __device__ void stage_queries(const Block& block, int i, float* numbers, int lane) {
        const int smallest = block.head.position(i) - (block.first + block.rows - 1);
        stage_entries<kQueries>(block, smallest, 1, 1, numbers, lane);
    }
    static __device__ Query query(const Block& block, int i) {
        return {block.rows - 1 - (i - block.first)};
    }
    static __device__ Key key(const Block& block, int j) { return query(block, j); }
    static __device__ float bias(const Query& query, const float* numbers, int column, float) {
        return numbers[query.row + column];
    }
    static __device__ float bias_of_key(const Key& key, const float* numbers, int column, float) {
        return bias(key, numbers, column, 0);
    }

private:
    template <int kKeys>
    static __device__ void stage_keys(const Block& block, int j, float factor, float* numbers,
                                      int lane) {
        const int largest = block.head.position(block.first) + block.rows - 1 - j;
        stage_entries<kKeys>(block, largest, -1, factor, numbers, lane);
    }
    // Writes the entries of distances d, d + step, ..., times a factor.
    template <int kColumns>
    static __device__ void stage_entries(const Block& block, int d, int step, float factor,
                                         float* numbers, int lane) {
        const Range own = distances(block.problem);
        const float* table = block.bias.table.at(block.head.b, block.head.h);
        // Finite entries stay finite in base 2 and, which is why their limit depends on the scale,
        // in units of products.
        const float largest = -kLowest / 4 * fminf(1, fabsf(block.problem.scale) * kLog2E);
#pragma unroll
        for (int n = lane; n < block.rows + kColumns; n += 32) {
            const int of_n = d + n * step;
            const float entry = own.contains(of_n) ? table[of_n - own.begin] : 0;
            numbers[n] =
                factor * kLog2E * (fabsf(entry) == kInfinity ? entry : limited(entry, largest));
        }
    }
};

}  // namespace forms

}  // namespace bfa::cuda
