// Dot products of a few queries with keys in place: keys are neither packed nor transposed.
#pragma once

#include "gemm.h"

namespace bfa::BFA_KERNELS {

// products[r * kTile + j] = a_r . keys[j], for rows of `depth` operands, a multiple of the vector
// length.
//
// A block of rows and keys is accumulated lane by lane in registers; then the lanes of all its
// accumulators are reduced together.
template <class Arithmetic>
class Dots {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    static constexpr int kLane = kLanes<Real>;
    static constexpr int kRows = 4, kKeys = kVectorBytes == 64 ? 4 : 2;
    static_assert(kLane <= kRows * kKeys);

public:
    // begin_keys(j, end) is called before the products of keys [j, end).
    template <class Function>
    static void all(int rows, int n_keys, int64_t depth, const Operand* a,
                    const Operand* const* keys, Real* products, Function begin_keys) {
        for (int j = 0; j < n_keys; j += kKeys) {
            begin_keys(j, std::min(j + kKeys, n_keys));
            const int count = std::min(kKeys, n_keys - j);
            const Operand* block[kKeys];  // padded by repeating the last key
            for (int x = 0; x < kKeys; ++x) block[x] = keys[j + std::min(x, count - 1)];
            for (int r = 0; r < rows; r += kRows)
                with_constant<kRows>(std::min(kRows, rows - r), [&](auto n_rows) {
                    add<n_rows>(depth, a + r * depth, block, count, products + r * kTile + j);
                });
        }
    }

private:
    template <int kCount>
    static BFA_INLINE void add(int64_t depth, const Operand* a, const Operand* const* keys,
                               int count, Real* products) {
        Vector<Real> sums[kCount][kKeys] = {};
        for (int64_t k = 0; k < depth; k += kLanes<Operand>) {
            Vector<Operand> key[kKeys];
#pragma GCC unroll 4
            for (int x = 0; x < kKeys; ++x) key[x] = load(keys[x] + k);
#pragma GCC unroll 4
            for (int r = 0; r < kCount; ++r) {
                const Vector<Operand> row = load(a + r * depth + k);
#pragma GCC unroll 4
                for (int x = 0; x < kKeys; ++x)
                    sums[r][x] = Arithmetic::dot(row, key[x], sums[r][x]);
            }
        }
        alignas(64) Real lanes[kRows * kKeys * kLane] = {};
        alignas(64) Real totals[kRows * kKeys];
        std::memcpy(lanes, sums, sizeof sums);
        for (int n = 0; n < kCount * kKeys; n += kLane)
            store(totals + n, sums_of_lanes(lanes + n * kLane));
        for (int r = 0; r < kCount; ++r)
            for (int x = 0; x < count; ++x) products[r * kTile + x] = totals[r * kKeys + x];
    }
};

// Returns a . a for a row of `depth` operands.
template <class Arithmetic>
double length_squared(const typename Arithmetic::Operand* a, int64_t depth) {
    Vector<typename Arithmetic::Real> sum{};
    for (int64_t k = 0; k < depth; k += kLanes<typename Arithmetic::Operand>)
        sum = Arithmetic::dot(load(a + k), load(a + k), sum);
    return double(reduce_sum<typename Arithmetic::Real>(sum));
}

}  // namespace bfa::BFA_KERNELS
