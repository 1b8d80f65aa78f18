// The state of the online softmax of some rows. After each tile, every row has
// o = sum_j 2^(s_j - m) v_j and l = sum_j 2^(s_j - m), with logits s in base 2. The pivot m is not
// the exact maximum: it only satisfies max_j s_j <= m + slack, so it rarely has to be raised after
// the first tile.
#pragma once

#include <limits>

#include "arithmetic.h"
#include "math.h"
#include "workspace.h"

namespace bfa::BFA_KERNELS {

template <class Arithmetic>
struct SoftmaxRows {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    static constexpr int kLane = kLanes<Real>;
    static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

    Real *outputs, *pivots, *sums;  // o; m; l, one vector per row
    int64_t columns;                // columns of o, a multiple of the vector length

    // Weights of up to 2^8 instead of 1 are safe unless the values are so large that their weighted
    // sums might overflow.
    static Real slack(Real largest_value) { return largest_value < Real(0x1p64) ? 8 : 0; }

    static SoftmaxRows take(Arena& arena, int64_t rows, int64_t columns) {
        return {arena.take<Real>(rows * columns), arena.take<Real>(rows),
                arena.take<Real>(rows * kLane), columns};
    }

    SoftmaxRows from(int64_t row) const {
        return {outputs + row * columns, pivots + row, sums + row * kLane, columns};
    }

    void clear(int64_t rows) const {
        std::memset(outputs, 0, rows * columns * sizeof(Real));
        std::memset(sums, 0, rows * kLane * sizeof(Real));
        std::fill(pivots, pivots + rows, -kInfinity);
    }

    // Sets the pivot of a row, and rescales its o and l.
    void move_pivot(int64_t row, Real pivot) const {
        const Real shrink = exp2(broadcast(pivots[row] - pivot))[0];
        pivots[row] = pivot;
        for (int64_t c = 0; c < columns; c += kLane) {
            Real* output = outputs + row * columns + c;
            store(output, load(output) * shrink);
        }
        store(sums + row * kLane, load(sums + row * kLane) * shrink);
    }

    // Sets m = max_j s_j in the rows where that exceeds m + slack, and multiplies their o and l by
    // 2^(old m - new m). logits is (rows, kTile).
    __attribute__((noinline)) void raise_pivots(int rows, int width, const Real* logits,
                                                Real slack) const {
        for (int r = 0; r < rows; ++r) {
            Vector<Real> largest_of_lane = broadcast(-kInfinity);
            for (int c = 0; c < width; c += kLane)
                largest_of_lane = max<Real>(load(logits + r * kTile + c), largest_of_lane);
            const Real largest = reduce_max<Real>(largest_of_lane);
            if (largest > pivots[r] + slack) move_pivot(r, largest);
        }
    }

    // Replaces logits by weights 2^(s - m), and adds these to l. In a row whose pivot is still
    // -inf, all logits are -inf and all weights 0.
    BFA_INLINE void exponentiate(int rows, int width, Real* logits) const {
        for (int r = 0; r < rows; ++r) {
            const Real* row = logits + r * kTile;
            Operand* weights = reinterpret_cast<Operand*>(logits) + r * kTile;
            const Real pivot = pivots[r] == -kInfinity ? 0 : pivots[r];
            Vector<Real> total{};
            if constexpr (Arithmetic::pair == 1) {
#pragma GCC unroll 4
                for (int c = 0; c < width; c += kLane) {
                    const Vector<Real> weight = exp2(load(row + c) - pivot);
                    total += weight;
                    store(weights + c, weight);
                }
            } else {
#pragma GCC unroll 2
                for (int c = 0; c < width; c += 2 * kLane) {
                    const Vector<Real> first = exp2<true>(load(row + c) - pivot);
                    const Vector<Real> second = exp2<true>(load(row + c + kLane) - pivot);
                    total += first + second;
                    store(weights + c / 2, Arithmetic::pairs_along_row(first, second));
                }
            }
            store(sums + r * kLane, load(sums + r * kLane) + total);
        }
    }

    Real sum(int64_t row) const { return reduce_sum<Real>(load(sums + row * kLane)); }

    // Returns log2 l, or -inf for a row without weights.
    double log_sum(int64_t row) const { return std::log2(double(sum(row))); }

    // Returns the natural logarithm of a row's sum of exponentials.
    double lse(int64_t row) const { return (double(pivots[row]) + log_sum(row)) * kLn2; }

    // Writes o / l in the element type, or 0 where l = 0: o is then undefined.
    void write_output(int64_t row, Element element, int64_t value_dim, char* target) const {
        Real* output = outputs + row * columns;
        const Real sum = this->sum(row);
        if (sum == 0) std::memset(output, 0, value_dim * sizeof(Real));
        write_row(element, output, sum == 0 ? Real(0) : 1 / sum, value_dim, target);
    }
};

}  // namespace bfa::BFA_KERNELS
