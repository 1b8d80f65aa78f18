// b = beta or -log(1 + beta^2), where beta = g (C[p] - C[j]) for keys up to the query, and
// g (C[j] - C[p]) for those after it. C are prefix sums, g the gain of the query, or 1.
#pragma once

#include "forms/form.cuh"

namespace bfa::cuda::forms {

// Each C is the sum of two float32 numbers, so that small differences survive after large steps.
template <bool kHasGain, bool kIsLogSquare>
struct PrefixSums {
    static constexpr bool kExists = true, kHasSides = true;
    static constexpr bool kTrainsGain = kHasGain, kTrainsSums = true;
    static constexpr bool kTrainsTable = false;
    static constexpr bool kSeparates = !kIsLogSquare, kHasFactors = kHasGain;
    static constexpr bool kStarts = true;
    template <int kKeys>
    static constexpr int kNumbers = 2 * kKeys;
    template <int kKeys>
    static constexpr int kStartNumbers = kNumbers<kKeys> + 1;
    template <int kQueries>
    static constexpr int kNumbersOfQueries = 4 * kQueries;

    struct Key {
        float high, low;
    };
    struct Query : Key {
        float gain;
    };

    template <int kKeys>
    static __device__ void stage(const Block& block, int j, float* numbers, int lane) {
#pragma unroll
        for (int n = lane; n < kKeys; n += 32) {
            const Key found = key(block, j + n);
            numbers[2 * n] = found.high, numbers[2 * n + 1] = found.low;
        }
    }
    // For tiles on one side of all queries, sums from the key that is nearest to them, whose own
    // sum follows. Rounding large ones would affect keys with a small bias, if later steps cancel
    // them. In the end the side, 0 if the numbers are those of `stage`.
    template <int kKeys>
    static __device__ void stage_start(const Block& block, int j, float* numbers, int lane) {
        int side = side_of_keys(block, j, kKeys);
        if (side != 0) {
            const int end = minimum(j + kKeys, block.head.n_key);
            const Key nearest = key(block, side > 0 ? end - 1 : j);
            bool is_large = false;
#pragma unroll
            for (int n = lane; n < kKeys; n += 32) {
                numbers[n] = difference(key(block, j + n), nearest);
                is_large |= j + n < end && !(fabsf(numbers[n]) <= kLargestSum);
            }
            if (lane == 0) numbers[kKeys] = nearest.high, numbers[kKeys + 1] = nearest.low;
            if (__any_sync(~0u, is_large)) side = 0;
            __syncwarp();  // `stage` replaces numbers of other lanes
        }
        if (side == 0) stage<kKeys>(block, j, numbers, lane);
        if (lane == 0) numbers[kNumbers<kKeys>] = float(side);
    }
    template <int kKeys>
    static __device__ int side(const Block&, int, const float* numbers) {
        return int(numbers[kNumbers<kKeys>]);
    }
    struct Start {
        float base, step, unit;
        const float* sums;

        __device__ float at(int n) const {
            const float x = fmaf(step, sums[n], base);
            return kIsLogSquare ? unit * of_beta(x) : x;
        }
    };
    template <int kKeys>
    static __device__ Start start(const Query& query, const float* numbers, int column, float,
                                  float side, float unit) {
        const float step = kIsLogSquare ? query.gain : kLog2E * unit * side * query.gain;
        const float from_nearest = difference(query, {numbers[kKeys], numbers[kKeys + 1]});
        return {step * from_nearest, -step, unit, numbers + column};
    }
    template <int kQueries>
    static __device__ void stage_queries(const Block& block, int i, float* numbers, int lane) {
        const Head& head = block.head;
        // Loads of queries that lack a sum are repeated ones, so that all are under way at a time.
#pragma unroll
        for (int n = lane; n < kQueries; n += 32) {
            const int existing = minimum(i + n, head.n_query - 1), p = head.position(existing);
            const bool exists = i + n < head.n_query;
            const Key sum = at(block, maximum(p, 0));
            numbers[4 * n] = exists && p >= 0 ? sum.high : 0;
            numbers[4 * n + 1] = exists && p >= 0 ? sum.low : 0;
            numbers[4 * n + 2] = 1;
            if constexpr (kHasGain) {
                const int64_t row = head.first_query + existing;
                const float gain = limited_gain(*block.bias.gain.at(head.b, head.h, row));
                numbers[4 * n + 2] = exists ? gain : 0;
            }
            numbers[4 * n + 3] = 0;  // for aligned loads
        }
    }
    // For keys on one side of all queries. Rounding large differences of sums would affect keys
    // with a small bias, if later steps cancel them.
    class Separated {
    public:
        // The whole warp calls it.
        __device__ Separated(const Block& block, int lane)
            : block_(block), nearest_(nearest_key(block)) {
            bool is_large = false;
            for (int n = lane; n < block.rows; n += 32) {
                const int j = minimum(block.first + n, block.head.n_key - 1);
                is_large |= !(fabsf(difference(key(block, j), nearest_)) <= kLargestSum);
            }
            exists_ = block.problem.causal && !__any_sync(~0u, is_large);
        }
        __device__ int side(int, int) const { return exists_; }
        __device__ float of_query(const Query& query, int, int) const {
            return kLog2E * query.gain * difference(query, nearest_);
        }

    private:
        const Block& block_;
        Key nearest_;
        bool exists_;
    };

    static __device__ Key nearest_key(const Block& block) {
        return key(block, minimum(block.first + block.rows, block.head.n_key) - 1);
    }
    static __device__ float separated_key(const Block& block, int j) {
        return (kHasGain ? 1 : kLog2E) * difference(nearest_key(block), key(block, j));
    }
    static __device__ Key key(const Block& block, int j) {
        return j < block.head.n_key ? at(block, j) : Key{0, 0};
    }
    static __device__ Query query(const Block& block, int i) {
        const Head& head = block.head;
        const int p = head.position(i);
        const bool exists = i < head.n_query;
        Query query{exists && p >= 0 ? at(block, p) : Key{0, 0}, 1};
        if constexpr (kHasGain) {
            const int64_t row = head.first_query + i;
            query.gain = exists ? limited_gain(*block.bias.gain.at(head.b, head.h, row)) : 0;
        }
        return query;
    }
    template <class D>
    static __device__ float bias(const Query& query, const float* numbers, int column, D distance) {
        return bias_of(query, key_at(numbers, column), distance);
    }
    template <class D>
    static __device__ float bias_of_key(const Key& key, const float* numbers, int column,
                                        D distance) {
        return bias_of(query_at(numbers, column), key, distance);
    }
    template <class D>
    static __device__ void add_gradient(QueryGradient& sums, const Query& query,
                                        const float* numbers, int column, D distance,
                                        float grad_s) {
        const float between = sum_between(query, key_at(numbers, column), distance);
        const float of_beta = grad_of_beta(query, between, grad_s);
        sums.gain += of_beta * between;
        sums.sum += query.gain * signed_by(distance, of_beta);
    }
    template <class D>
    static __device__ float gradient_of_key(const Key& key, const float* numbers, int column,
                                            D distance, float grad_s) {
        const Query query = query_at(numbers, column);
        const float between = sum_between(query, key, distance);
        const float of_beta = query.gain * grad_of_beta(query, between, grad_s);
        return -signed_by(distance, of_beta);
    }

    // Of the query in a column.
    static __device__ Query query_at(const float* numbers, int column) {
        return {{numbers[4 * column], numbers[4 * column + 1]},
                kHasGain ? numbers[4 * column + 2] : 1};
    }
    static __device__ float difference(const Key& a, const Key& b) {
        return a.high - b.high + (a.low - b.low);
    }

private:
    static __device__ Key at(const Block& block, int place) {
        const Head& head = block.head;
        const int64_t n = head.first_key + place;
        return {*block.bias.high.at(head.b, head.h, n), *block.bias.low.at(head.b, head.h, n)};
    }
    static __device__ Key key_at(const float* numbers, int column) {
        return {numbers[2 * column], numbers[2 * column + 1]};
    }
    // beta without the gain.
    template <class D>
    static __device__ float sum_between(const Key& query, const Key& key, D distance) {
        return signed_by(distance, difference(query, key));
    }
    // -x where the bias has -(C[p] - C[j]). The sign of what is squared is arbitrary.
    static __device__ float signed_by(Past, float x) { return x; }
    static __device__ float signed_by(float distance, float x) {
        return !kIsLogSquare && distance < 0 ? -x : x;
    }
    template <class D>
    static __device__ float bias_of(const Query& query, const Key& key, D distance) {
        const float beta = query.gain * sum_between(query, key, distance);
        return kIsLogSquare ? of_beta(beta) : kLog2E * beta;
    }
    // -log(1 + beta^2) in base 2.
    static __device__ float of_beta(float beta) {
        const float limited = limited_gain(beta);
        return -log2_approximate(1 + limited * limited);
    }
    static __device__ float grad_of_beta(const Query& query, float between, float grad_s) {
        const float beta = query.gain * between;
        return kIsLogSquare ? grad_s * __fdividef(-2 * beta, 1 + beta * beta) : grad_s;
    }
};

using Cumulative = PrefixSums<false, false>;
using CumulativeWithGain = PrefixSums<true, false>;
using LogSquare = PrefixSums<false, true>;
using LogSquareWithGain = PrefixSums<true, true>;

}  // namespace bfa::cuda::forms
