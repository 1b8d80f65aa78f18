// The linear form: bias_ij = -slope |d|, with distances computed relative to the tile.
#pragma once

#include "base.h"

namespace bfa::BFA_KERNELS {

struct Linear : FormDefaults<Linear> {
    enum Tensor { kSlopes };
    static constexpr FormTraits traits = {"linear", {{"slopes", rows::one, Refused::nan}}};

    template <class Real>
    class Tile;
    template <class Real>
    class Page;
};

template <class Real>
class Linear::Tile : public TileDefaults {
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

    Tile(Arena&, const Problem& problem, bool) : problem_(problem) {}

    void begin_head(int64_t b, int64_t h) {
        slope_ = -limited_gain(*problem_.form_tensors[kSlopes].at<Real>(b, h)) * Real(kLog2e);
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

    BFA_INLINE void add_gradient(Row& row, int column, Vector<Real> gradient) {
        row.gradient -= gradient * row.distance(column);
    }
    BFA_INLINE void end_row(const Row& row, int) { block_gradient_ += row.gradient; }
    void end_block(Range) {
        gradient_ += reduce_sum<Real>(block_gradient_);
        block_gradient_ = Vector<Real>{};
    }
    void end_head(const FormTensor* gradients, int64_t b, int64_t h) {
        *gradients[kSlopes].at<Real>(b, h) += Real(gradient_);
    }

private:
    const Problem& problem_;
    Real slope_;
    int64_t tile_begin_;
    Vector<Real> block_gradient_;
    double gradient_;
};

template <class Real>
class Linear::Page final : public PageBias<Real> {
    using PageBias<Real>::p_, PageBias<Real>::block_;

public:
    Page(Arena&, const Decode& problem, int) : PageBias<Real>(problem) {}

    void fill(int row, Range keys, const PageSlot&, Range visible, Real* out) const override {
        const Real distance = Real(block_->position(row) - keys.begin);
        const Vector<Real> factor = broadcast(-slope(row) * Real(kLog2e));
        for (int c = int(visible.begin) / kLane * kLane; c < visible.end; c += kLane)
            store(out + c, factor * (broadcast(distance - Real(c)) - iota<Real>()));
    }

    double highest(int row, Range keys, const PageSlot&) const override {
        const auto [nearest, farthest] = this->distances(row, keys);
        const double factor = -double(slope(row));
        return factor * double(factor < 0 ? nearest : farthest);
    }

private:
    static constexpr int kLane = kLanes<Real>;

    Real slope(int row) const {
        return limited_gain(
            *p_.form_tensors[kSlopes].template at<Real>(block_->b, block_->head(row)));
    }
};

}  // namespace bfa::BFA_KERNELS
