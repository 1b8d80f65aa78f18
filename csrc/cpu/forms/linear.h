#pragma once

#include "base.h"

namespace bfa::BFA_KERNELS {

// -slope |d|, with distances computed relative to the tile.
template <class Real>
class LinearBias : public BiasDefaults {
public:
    struct Row {
        Vector<Real> slope, distance_to_tile, gradient;

        BFA_INLINE Vector<Real> distance(int column) const {
            return abs<Real>(distance_to_tile - (iota<Real>() + Real(column)));
        }
        BFA_INLINE Vector<Real> added_to(Vector<Real> s, int column) const {
            return s + slope * distance(column);
        }
    };

    LinearBias(Arena&, const Problem& problem, bool) : problem_(problem) {}

    void begin_head(int64_t b, int64_t h) {
        slope_ = -*problem_.form_tensors[0].at<Real>(b, h) * Real(kLog2e);
        gradient_ = 0;
    }

    void begin_tile(Range keys) {
        tile_begin_ = keys.begin;
        block_gradient_ = Vector<Real>{};
    }

    template <class Function>
    BFA_INLINE void with_row(int64_t query, Function function) const {
        function(Row{broadcast(slope_), broadcast(Real(problem_.position(query) - tile_begin_)),
                     Vector<Real>{}});
    }

    static constexpr bool has_gradient = true;

    BFA_INLINE void add_gradient(Row& row, int column, Vector<Real> gradient) {
        row.gradient -= gradient * row.distance(column);
    }
    BFA_INLINE void end_row(const Row& row, int) { block_gradient_ += row.gradient; }
    void end_block(Range) {
        gradient_ += reduce_sum<Real>(block_gradient_);
        block_gradient_ = Vector<Real>{};
    }
    void end_head(const FormTensor* gradients, int64_t b, int64_t h) {
        *gradients[0].at<Real>(b, h) += Real(gradient_);
    }

private:
    const Problem& problem_;
    Real slope_;
    int64_t tile_begin_;
    Vector<Real> block_gradient_;
    double gradient_;
};

}  // namespace bfa::BFA_KERNELS
