// The products of row vectors a_r with the vectors of distances v, where column c of row r has that
// at place base - r + c: a matrix product E = A V whose rows are shifted against each other.
//
// Only the entries near the diagonal band of E that is used are computed, a few rows at a time, and
// likewise in the products with the gradient of E.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>

#include "../../packed_rows.h"
#include "../../visibility.h"
#include "distance_vectors.h"

namespace bfa::BFA_KERNELS {

template <class Arithmetic, int kRows, int kWidth>
class ShearedProducts {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    using Vectors = DistanceVectors<Arithmetic>;
    static constexpr int kPair = Arithmetic::pair, kLane = kLanes<Real>;
    // Rows of E, and rows or columns of its gradient, of one product. Multiples of 16 rows of E
    // begin at whole vectors of places; the other products have whole blocks of registers.
    static constexpr int kRowGroup = 16, kGroup = 2 * kRegisterRows;
    static constexpr int kStride = Vectors::kSpan;
    static_assert(kRows + round_up(kWidth + kRowGroup, kLane) - kRowGroup <= kStride);
    static_assert(kRows > kGroup);
    static_assert(kRows % kPair == 0 && kWidth % kPair == 0 && kGroup % kPair == 0);

public:
    ShearedProducts(Arena& arena, bool exists, bool with_gradient)
        : products_(arena.take<Real>(exists ? kRows * kStride : 0)),
          gradients_(arena.take<Real>(exists && with_gradient ? kRows * kStride : 0)),
          pairs_(arena.take<Operand>(exists && with_gradient && kPair == 2 ? kRows / kPair * kStride
                                                                           : 0)) {}

    // Starts products of which row kRows - 1 begins at `place`.
    void begin(int64_t place) {
        place_ = place / kPair * kPair;
        shift_ = int(place % kPair);
    }

    void compute(const LeftMatrix<Operand>& a, const Vectors& vectors) {
        for (int row = 0; row < kRows; row += kRowGroup) {
            const int rows = std::min(kRowGroup, kRows - row), column = kRows - row - rows;
            gemm<Arithmetic, false>(rows, round_up(kWidth + kRowGroup, kLane), vectors.depth(),
                                    {a.data + row * a.row_stride, a.row_stride, a.depth_stride},
                                    vectors.contracting_ranks(place_ + column),
                                    {products_ + row * kStride + column, kStride});
        }
    }

    // Entry c of a row is at c, and that of the next row is kNextRow further.
    static constexpr int kNextRow = kStride - 1;
    Real* row(int64_t row) const { return products_ + row * kStride + offset(row); }
    Real* gradient_row(int64_t row) const { return gradients_ + row * kStride + offset(row); }

    // Clears the entries around those of each row, which the products read too.
    void clear_margins() const {
        for (int row = 0; row < kRows; ++row) {
            Real *first = gradient_row(row), *end = first + kWidth;
            // Those before the last rows are unused entries of the row above.
            std::memset(first - kGroup, 0, kGroup * sizeof(Real));
            std::memset(end, 0, kGroup * sizeof(Real));
        }
    }
    void clear_rows() const {
        for (int row = 0; row < kRows; ++row)
            std::memset(gradient_row(row), 0, kWidth * sizeof(Real));
    }

    // A' += E' V^T and V' += A^T E', where X' is the gradient of X.
    void add_gradients(const RightMatrix<Operand>& a, const Result<Real>& a_gradient,
                       const Vectors& vectors) {
        pack_pairs_of_columns();
        const RightMatrix<Operand> places = vectors.contracting_places(place_, kRows + kWidth);
        for (int row = 0; row < kRows; row += kGroup) {
            const int rows = std::min(kGroup, kRows - row), column = kRows - row - rows;
            gemm<Arithmetic, true>(rows, a_gradient.stride, (rows + kWidth) / kPair,
                                   along_row(row, column),
                                   {places.data + column / kPair * places.stride, places.stride},
                                   {a_gradient.data + row * a_gradient.stride, a_gradient.stride});
        }
        pack_pairs_of_rows();
        for (int column = 0; column < kRows + kWidth; column += kGroup) {
            const int columns = std::min(kGroup, kRows + kWidth - column);
            const int first = kRows + shift_ - column - columns;
            const int begin = std::max(first, 0) / kPair * kPair;
            const int end =
                std::min<int>(round_up(kRows - 1 + shift_ + kWidth - column, kPair), kRows);
            if (begin < end)
                gemm<Arithmetic, true>(columns, vectors.columns(), (end - begin) / kPair,
                                       along_column(begin, column),
                                       {a.data + begin / kPair * a.stride, a.stride},
                                       vectors.gradient(place_ + column));
        }
    }

    // The same without the terms of masked pairs, for operands with infinities or NaN. visible(row)
    // returns the entries of a row that have a visible pair.
    template <class VisibleEntries>
    void add_visible_gradients(const RightMatrix<Operand>& a, const Result<Real>& a_gradient,
                               const Vectors& vectors, VisibleEntries visible) const {
        const RightMatrix<Operand> places = vectors.contracting_ranks(place_);
        const Result<Real> vector_gradients = vectors.gradient(place_);
        for (int row = 0; row < kRows; ++row) {
            const Range entries = visible(row);
            Real* row_gradient = a_gradient.data + row * a_gradient.stride;
            for (int64_t c = entries.begin; c < entries.end; ++c) {
                const Real gradient = gradient_row(row)[c];
                const int64_t place = offset(row) + c;
                Real* vector_gradient = vector_gradients.data + place * vector_gradients.stride;
                for (int64_t r = 0; r < vectors.rank(); ++r) {
                    row_gradient[r] += gradient * element(places, r, place);
                    vector_gradient[r] += gradient * element(a, row, r);
                }
            }
        }
    }

private:
    int64_t offset(int64_t row) const { return kRows - 1 - row + shift_; }
    static Real element(const RightMatrix<Operand>& x, int64_t depth, int64_t column) {
        return Arithmetic::element(x.data[depth / kPair * x.stride + column], int(depth % kPair));
    }

    // Gradients from an entry on, for products that contract places, and those that contract rows.
    LeftMatrix<Operand> along_row(int row, int column) const {
        if constexpr (kPair == 1) return {gradients_ + row * kStride + column, kStride, 1};
        return {pairs_ + (row * kStride + column) / kPair, kStride / kPair, 1};
    }
    LeftMatrix<Operand> along_column(int row, int column) const {
        if constexpr (kPair == 1) return {gradients_ + row * kStride + column, 1, kStride};
        return {pairs_ + row / kPair * kStride + column, 1, kStride};
    }

    void pack_pairs_of_columns() const {
        if constexpr (kPair == 2)
            for (int row = 0; row < kRows; ++row) {
                const auto [begin, end] = used_columns(row, row);
                for (int c = begin; c < end; c += 2 * kLane) {
                    const Real* source = gradients_ + row * kStride + c;
                    store(pairs_ + (row * kStride + c) / 2,
                          Arithmetic::pairs_along_row(load(source), load(source + kLane)));
                }
            }
    }
    void pack_pairs_of_rows() const {
        if constexpr (kPair == 2)
            for (int row = 0; row < kRows; row += 2) {
                const auto [begin, end] = used_columns(row, row + 1);
                for (int c = begin; c < end; c += kLane) {
                    const Real* source = gradients_ + row * kStride + c;
                    store(pairs_ + row / 2 * kStride + c,
                          Arithmetic::pairs_along_column(load(source), load(source + kStride)));
                }
            }
    }
    // The columns that products read in these rows, rounded to whole vectors.
    static std::pair<int, int> used_columns(int first_row, int last_row) {
        constexpr int kVectors = 2 * kLane;
        const int begin = std::max(kRows - 1 - last_row - kGroup, 0) / kVectors * kVectors;
        const int end = kRows - first_row + kWidth + kGroup;
        return {begin, std::min<int>(round_up(end, kVectors), kStride)};
    }

    Real *products_, *gradients_;
    Operand* pairs_;
    int64_t place_ = 0;
    int shift_ = 0;
};

}  // namespace bfa::BFA_KERNELS
