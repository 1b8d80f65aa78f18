// No bias.
#pragma once

#include "forms/form.cuh"

namespace bfa::cuda::forms {

struct None {
    static constexpr bool kExists = false, kHasSides = false;
    static constexpr bool kTrainsGain = false, kTrainsSums = false;
    static constexpr bool kTrainsTable = false;
    static constexpr bool kSeparates = false, kHasFactors = false;
    static constexpr bool kStarts = false;
    template <int kKeys>
    static constexpr int kNumbers = 0;
    template <int kKeys>
    static constexpr int kStartNumbers = 0;
    template <int kQueries>
    static constexpr int kNumbersOfQueries = 0;

    struct Query {};
    struct Key {};

    static __device__ Query query(const Block&, int) { return {}; }
    static __device__ Key key(const Block&, int) { return {}; }
    static __device__ float bias(const Query&, const float*, int, float) { return 0; }
    static __device__ float bias_of_key(const Key&, const float*, int, float) { return 0; }
};

}  // namespace bfa::cuda::forms
