// b = -m |d|, with the slope m of the head.
#pragma once

#include "forms/form.cuh"

namespace bfa::cuda::forms {

struct Linear {
    static constexpr bool kExists = true, kHasSides = false;
    static constexpr bool kTrainsGain = true, kTrainsSums = false;
    static constexpr bool kTrainsTable = false;
    static constexpr bool kSeparates = true, kHasFactors = false;
    static constexpr bool kStarts = true;
    template <int kKeys>
    static constexpr int kNumbers = 0;
    template <int kKeys>
    static constexpr int kStartNumbers = 0;
    template <int kQueries>
    static constexpr int kNumbersOfQueries = 0;

    struct Query {
        float slope;  // in base 2
    };
    using Key = Query;

    template <int kKeys>
    static __device__ int side(const Block& block, int j, const float*) {
        return side_of_keys(block, j, kKeys);
    }
    struct Start {
        float base, step;

        __device__ float at(int column) const { return fmaf(step, float(column), base); }
    };

    template <int kKeys>
    static __device__ Start start(const Query& query, const float*, int, float distance, float side,
                                  float unit) {
        const float step = side * unit * query.slope;
        return {-step * distance, step};
    }
    class Separated {
    public:
        __device__ Separated(const Block& block, int) : block_(block) {
            slope_ = query(block, 0).slope;
        }
        __device__ int side(int i, int count) const {
            const int first = block_.head.position(i);
            if (block_.problem.causal || first >= block_.first + block_.rows - 1) return 1;
            return first + count <= block_.first ? -1 : 0;
        }
        __device__ float of_query(const Query&, int i, int side) const {
            return -slope_ * float(side * (block_.head.position(i) - block_.first));
        }

    private:
        const Block& block_;
        float slope_;
    };

    static __device__ Query query_at(const float*, int) { return {}; }
    static __device__ float separated_key(const Block& block, int j) {
        return query(block, 0).slope * float(j - block.first);
    }
    static __device__ Query query(const Block& block, int) {
        return {kLog2E * limited_gain(*block.bias.slopes.at(block.head.b, block.head.h))};
    }
    static __device__ Key key(const Block& block, int) { return query(block, 0); }
    static __device__ float bias(const Query& query, const float*, int, float distance) {
        return -query.slope * fabsf(distance);
    }
    static __device__ float bias_of_key(const Key& key, const float*, int, float distance) {
        return bias(key, nullptr, 0, distance);
    }
    static __device__ void add_gradient(QueryGradient& sums, const Query&, const float*, int,
                                        float distance, float grad_s) {
        sums.gain += grad_s * fabsf(distance);
    }
    static __device__ float gradient_of_key(const Key&, const float*, int, float distance,
                                            float grad_s) {
        return grad_s * fabsf(distance);
    }
};

}  // namespace bfa::cuda::forms
