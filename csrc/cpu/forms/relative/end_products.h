// Products beyond a table of the relative form, where all distances have the same vector.
#pragma once

#include <algorithm>

#include "../../visibility.h"
#include "distance_vectors.h"

namespace bfa::BFA_KERNELS {

// The products of rows of queries or keys with the vectors beyond either end of a table, and the
// gradients of these numbers. Those of a row, and those of a vector, are sums over most pairs of
// the row, and over most rows: they are float64.
template <class Arithmetic>
class EndProducts {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    static constexpr int kLane = kLanes<Real>;

public:
    EndProducts(Arena& arena, int64_t rows, int64_t rank, bool with_gradient)
        : rows_(rows),
          rank_(rank),
          equal_columns_(arena.take<Real>(rows > 0 ? kTile * kLane : 0)),
          products_(arena.take<Real>(2 * rows)),
          gradients_(arena.take<double>(with_gradient ? 2 * rows : 0)),
          vector_gradients_(arena.take<double>(with_gradient ? 2 * rank : 0)) {}

    // Of at most kTile rows from `first` on, which are those of a.
    void compute(int64_t first, int count, const LeftMatrix<Operand>& a,
                 const DistanceVectors<Arithmetic>& vectors) {
        for (int end = 0; end < 2; ++end) {
            gemm<Arithmetic, false>(count, kLane, vectors.depth(), a,
                                    vectors.contracting_ranks(vectors.place_beyond(end)),
                                    {equal_columns_, kLane});
            for (int row = 0; row < count; ++row)
                products_[end * rows_ + first + row] = equal_columns_[row * kLane];
        }
    }
    void clear_gradients() { std::fill_n(gradients_, 2 * rows_, 0); }
    void clear_vector_gradients() { std::fill_n(vector_gradients_, 2 * rank_, 0); }

    const Real* products(int end) const { return products_ + end * rows_; }
    double* gradients(int end) const { return gradients_ + end * rows_; }

    // Adds to the gradients of the rows of a, from `first` on, and sums those of the vectors.
    void add_gradients(int64_t first, int64_t count, const LeftMatrix<Operand>& a,
                       const Result<Real>& row_gradients,
                       const DistanceVectors<Arithmetic>& vectors) const {
        for (int end = 0; end < 2; ++end) {
            const Real* vector = vectors.end(end);
            double* vector_gradient = vector_gradients_ + end * rank_;
            for (int64_t row = 0; row < count; ++row) {
                const double gradient = gradients(end)[first + row];
                if (gradient == 0) continue;
                Real* row_gradient = row_gradients.data + row * row_gradients.stride;
                for (int64_t r = 0; r < rank_; ++r) {
                    row_gradient[r] += Real(gradient) * vector[r];
                    vector_gradient[r] += gradient * element(a.data + row * a.row_stride, r);
                }
            }
        }
    }
    void add_vector_gradients(const DistanceVectors<Arithmetic>& vectors) const {
        for (int end = 0; end < 2; ++end)
            for (int64_t r = 0; r < rank_; ++r)
                vectors.end_gradient(end)[r] += Real(vector_gradients_[end * rank_ + r]);
    }

private:
    static Real element(const Operand* row, int64_t r) {
        return Arithmetic::element(row[r / Arithmetic::pair], int(r % Arithmetic::pair));
    }

    const int64_t rows_, rank_;
    Real *equal_columns_, *products_;
    double *gradients_, *vector_gradients_;
};

}  // namespace bfa::BFA_KERNELS
