// Matrix products c = a b and c += a b for the small matrices of one tile.
#pragma once

#include <algorithm>
#include <type_traits>

#include "arithmetic.h"

namespace bfa::BFA_KERNELS {

// Vectors of columns in a register block: 6 x 4 accumulators of 32 registers, or 6 x 2 of 16.
constexpr int kBlockVectors = kVectorBytes == 64 ? 4 : 2;

// Operand (r, k) is at data[r * row_stride + k * depth_stride], so that a transposed matrix needs
// no copy.
template <class Operand>
struct LeftMatrix {
    const Operand* data;
    int64_t row_stride, depth_stride;
};

// Operand (k, c) is at data[k * stride + c].
template <class Operand>
struct RightMatrix {
    static constexpr int kVectors = 1;  // vectors that are read together
    const Operand* data;
    int64_t stride;

    RightMatrix from_column(int64_t column) const { return {data + column, stride}; }

    template <int kCount>
    BFA_INLINE void read(int64_t k, Vector<Operand> (&columns)[kCount]) const {
#pragma GCC unroll 4
        for (int x = 0; x < kCount; ++x) columns[x] = load(data + k * stride + x * kLanes<Operand>);
    }
    // Permutes accumulators to the order of the columns.
    template <class Sum, int kCount>
    static BFA_INLINE void order(Sum (&)[kCount]) {}
};

template <class Real>
struct Result {
    Real* data;
    int64_t stride;
};

template <class Arithmetic, bool kAccumulate, int kRows, int kVectors, class Right>
BFA_INLINE void gemm_block(int64_t depth, LeftMatrix<typename Arithmetic::Operand> a, Right b,
                           Result<typename Arithmetic::Real> c) {
    using Real = typename Arithmetic::Real;
    // The block is summed from 0 even if it is added to c. Adding many small terms one by one to a
    // large c, which starts with the nearest keys, would lose precision.
    Vector<Real> sum[kRows][kVectors] = {};
    for (int64_t k = 0; k < depth; ++k) {
        Vector<typename Arithmetic::Operand> right[kVectors];
        b.read(k, right);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const auto left = a.data[r * a.row_stride + k * a.depth_stride];
#pragma GCC unroll 4
            for (int x = 0; x < kVectors; ++x)
                sum[r][x] = Arithmetic::dot(left, right[x], sum[r][x]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
        Right::order(sum[r]);
#pragma GCC unroll 4
        for (int x = 0; x < kVectors; ++x) {
            Real* target = c.data + r * c.stride + x * kLanes<Real>;
            store(target, kAccumulate ? load(target) + sum[r][x] : sum[r][x]);
        }
    }
}

// Calls function(integral_constant n) for a runtime n in 1..kMost.
template <int kMost, class Function>
BFA_INLINE void with_constant(int n, Function function) {
    if constexpr (kMost > 0) {
        if (n == kMost) return function(std::integral_constant<int, kMost>());
        with_constant<kMost - 1>(n, function);
    }
}

// `columns` is a multiple of Right::kVectors vectors; depth counts operands.
template <class Arithmetic, bool kAccumulate,
          class Right = RightMatrix<typename Arithmetic::Operand>>
__attribute__((noinline)) void gemm(int rows, int64_t columns, int64_t depth,
                                    LeftMatrix<typename Arithmetic::Operand> a, Right b,
                                    Result<typename Arithmetic::Real> c) {
    constexpr int kLane = kLanes<typename Arithmetic::Real>;
    // Blocks of similar width: one with few columns has few independent sums, and is slow.
    const int64_t blocks = (columns / kLane + kBlockVectors - 1) / kBlockVectors;
    const int64_t even = blocks ? (columns / kLane + blocks - 1) / blocks : 0;
    const int64_t width = round_up(even, Right::kVectors) * kLane;
    for (int64_t column = 0; column < columns; column += width) {
        const int vectors = int(std::min(columns - column, width) / kLane);
        with_constant<kBlockVectors / Right::kVectors>(vectors / Right::kVectors, [&](auto n) {
            const auto block = [&](int row, auto n_rows) {
                gemm_block<Arithmetic, kAccumulate, n_rows, n * Right::kVectors>(
                    depth, {a.data + row * a.row_stride, a.row_stride, a.depth_stride},
                    b.from_column(column), {c.data + row * c.stride + column, c.stride});
            };
            int row = 0;
            for (; row + kRegisterRows <= rows; row += kRegisterRows)
                block(row, std::integral_constant<int, kRegisterRows>());
            with_constant<kRegisterRows - 1>(rows - row, [&](auto rest) { block(row, rest); });
        });
    }
}

// c += a b without the terms (r, k) whose k is outside depth_range(r), for tiles with infinities or
// NaN at masked positions, where 0 * NaN must not reach the result. k counts numbers, not operands.
template <class Arithmetic, class DepthRange>
void gemm_visible(int rows, int64_t columns, LeftMatrix<typename Arithmetic::Operand> a,
                  RightMatrix<typename Arithmetic::Operand> b, Result<typename Arithmetic::Real> c,
                  DepthRange depth_range) {
    constexpr int kPair = Arithmetic::pair;
    for (int r = 0; r < rows; ++r) {
        const auto range = depth_range(r);
        for (int64_t k = range.begin; k < range.end; ++k) {
            const auto left = Arithmetic::element(
                a.data[r * a.row_stride + k / kPair * a.depth_stride], k % kPair);
            const auto* right = b.data + k / kPair * b.stride;
            for (int64_t x = 0; x < columns; ++x)
                c.data[r * c.stride + x] += left * Arithmetic::element(right[x], k % kPair);
        }
    }
}

}  // namespace bfa::BFA_KERNELS
