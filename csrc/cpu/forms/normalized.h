// The normalized form: bias_ij = f(gain_i table[d]), with f linear between its knots.
#pragma once

#include <algorithm>

#include "base.h"
#include "distance_table.h"
#include "segments.h"

namespace bfa::BFA_KERNELS {

struct Normalized : FormDefaults<Normalized> {
    enum Tensor { kTable, kGains, kKnots, kSlopes, kIntercepts };
    static constexpr FormTraits traits = {"normalized",
                                          {{"table values", rows::per_distance, Refused::nan, true},
                                           {"gains", rows::per_query, Refused::nan},
                                           {"knots", rows::all, Refused::nan},
                                           {"slopes", rows::all, Refused::nan},
                                           {"intercepts", rows::all, Refused::nan}}};

    template <class Real>
    class Tile;
    template <class Real>
    class Page;

    // Returns the function of one head.
    template <class Real>
    static Segments<Real> segments(const Problem& problem, int64_t b, int64_t h) {
        const FormTensor* tensors = problem.form_tensors;
        return {int(tensors[kKnots].rows) + 1, tensors[kKnots].at<Real>(b, h),
                tensors[kSlopes].at<Real>(b, h), tensors[kIntercepts].at<Real>(b, h)};
    }
};

// Along a row x = gain_i table[d] varies slowly, so that most vectors lie within one segment: the
// segment of the previous vector is tried first.
template <class Real>
class Normalized::Tile : public TileDefaults {
    static constexpr int kLane = kLanes<Real>;

    // The sums over the pairs of a segment that determine the gradient of its line, one per lane.
    struct Sums {
        Vector<Real> gradient, gradient_x;
    };

public:
    class Row {
    public:
        Row(const Tile& bias, int64_t query, Real gain)
            : bias_(bias),
              table_(bias.table_.row(query)),
              gain_(broadcast(gain)),
              nearest_(&bias.nearest_[query]) {
            enter(*nearest_);
        }

        BFA_INLINE Vector<Real> added_to(Vector<Real> s, int column) {
            const Vector<Real> x = gain_ * load(table_.values + column);
            if (__builtin_expect(any_outside<Real>(x, lower_, upper_), 0))
                return s + across_segments(x);
            return s + (intercept_ + slope_ * x);
        }

        BFA_INLINE void add_gradient(int column, Vector<Real> gradient) {
            const Vector<Real> t = load(table_.values + column);
            Real* target = table_.gradient + column;
            if (__builtin_expect(any_outside<Real>(gain_ * t, lower_, upper_), 0))
                return add_across_segments(t, gradient, target);
            gradient_sum_ += gradient;
            gradient_t_sum_ += gradient * t;
            store(target, load(target) + gradient * table_factor_);
        }

        // Adds the sums of the current segment to those of the head.
        BFA_INLINE void leave() {
            add(segment_, gradient_sum_, gradient_t_sum_);
            gradient_sum_ = gradient_t_sum_ = Vector<Real>{};
        }

        BFA_INLINE Vector<Real> gain_gradient() const { return gain_gradient_; }

    private:
        void enter(int segment) {
            const Segments<Real>& f = bias_.segments_;
            segment_ = segment;
            lower_ = broadcast(f.lower(segment)), upper_ = broadcast(f.upper(segment));
            slope_ = broadcast(f.slopes[segment] * Real(kLog2e));
            intercept_ = broadcast(f.intercepts[segment] * Real(kLog2e));
            table_factor_ = gain_ * f.slopes[segment];
        }

        // Returns the bias of a vector that is not within the current segment.
        __attribute__((noinline, cold)) Vector<Real> across_segments(Vector<Real> x) {
            if (bias_.sums_) leave();
            Vector<Real> result = {};
            for_each_segment(x, [&](int segment, Vector<Bits<Real>> inside) {
                enter(segment);
                result = inside ? intercept_ + slope_ * x : result;
            });
            enter(bias_.segments_.find(x[kLane - 1], segment_));
            *nearest_ = segment_;
            return result;
        }

        __attribute__((noinline, cold)) void add_across_segments(Vector<Real> t,
                                                                 Vector<Real> gradient,
                                                                 Real* target) {
            for_each_segment(gain_ * t, [&](int segment, Vector<Bits<Real>> inside) {
                const Vector<Real> own = inside ? gradient : Vector<Real>{};
                add(segment, own, own * t);
                store(target, load(target) + own * (gain_ * bias_.segments_.slopes[segment]));
            });
        }

        // Calls function(segment, lanes) for each segment that some lanes of x are in.
        template <class Function>
        BFA_INLINE void for_each_segment(Vector<Real> x, Function function) const {
            const Segments<Real>& f = bias_.segments_;
            const int first = f.find(-reduce_max<Real>(-x), segment_),
                      last = f.find(reduce_max<Real>(x), first);
            for (int segment = first; segment <= last; ++segment) {
                // Values in no segment, such as NaN, are assigned to the first one.
                Vector<Bits<Real>> inside = ~(x >= f.upper(segment));
                if (segment > first) inside &= x >= f.lower(segment);
                if (segment == last) inside |= ~(x < f.upper(segment));
                function(segment, inside);
            }
        }

        BFA_INLINE void add(int segment, Vector<Real> gradient, Vector<Real> gradient_t) {
            bias_.add(segment, gradient, gain_ * gradient_t);
            gain_gradient_ += gradient_t * bias_.segments_.slopes[segment];
        }

        const Tile& bias_;
        const typename DistanceTable<Real>::Row table_;
        const Vector<Real> gain_;
        int* nearest_;
        int segment_;
        Vector<Real> lower_, upper_, slope_, intercept_, table_factor_;
        Vector<Real> gradient_sum_ = {}, gradient_t_sum_ = {}, gain_gradient_ = {};
    };

    // A row of products that may exceed the largest Real, computed in float64.
    class WideRow {
    public:
        WideRow(const Tile& bias, int64_t query, Real gain)
            : bias_(bias), table_(bias.table_.row(query)), gain_(gain) {}

        Vector<Real> added_to(Vector<Real> s, int column) {
            const Segments<Real>& f = bias_.segments_;
            Vector<Real> values;
            for (int lane = 0; lane < kLane; ++lane) {
                const double x = gain_ * double(table_.values[column + lane]);
                segment_ = f.find(x, segment_);
                values[lane] = in_base_2<Real>(f.value(x, segment_));
            }
            return s + values;
        }

        void add_gradient(int column, Vector<Real> gradient) {
            for (int lane = 0; lane < kLane; ++lane) {
                if (gradient[lane] == 0) continue;  // of masked pairs, whose values are arbitrary
                const double t = table_.values[column + lane];
                segment_ = bias_.segments_.find(gain_ * t, segment_);
                const double slope = bias_.segments_.slopes[segment_];
                Vector<Real> own = {}, own_x = {};
                own[lane] = gradient[lane], own_x[lane] = Real(gradient[lane] * (gain_ * t));
                bias_.add(segment_, own, own_x);
                gain_gradient_[lane] += Real(gradient[lane] * (slope * t));
                table_.gradient[column + lane] += Real(gradient[lane] * (slope * gain_));
            }
        }

        void leave() {}
        Vector<Real> gain_gradient() const { return gain_gradient_; }

    private:
        const Tile& bias_;
        const typename DistanceTable<Real>::Row table_;
        const double gain_;
        int segment_ = 0;
        Vector<Real> gain_gradient_ = {};
    };

    Tile(Arena& arena, const Problem& problem, bool with_gradient)
        : problem_(problem),
          table_(arena, problem, problem.form_tensors[kTable], with_gradient),
          segments_(segments<Real>(problem, 0, 0)),
          nearest_(arena.take<int>(problem.n_query)),
          sums_(with_gradient ? arena.take<Sums>(segments_.count) : nullptr),
          row_gain_gradients_(arena.take<Real>(with_gradient ? kLane * kLane : 0)),
          slope_gradients_(arena.take<double>(with_gradient ? segments_.count : 0)),
          intercept_gradients_(arena.take<double>(with_gradient ? segments_.count : 0)),
          gain_gradients_(arena.take<double>(with_gradient ? problem.n_query : 0)) {}

    void begin_head(int64_t b, int64_t h) {
        table_.begin_head(b, h, [](Real value) { return value; });
        segments_ = segments<Real>(problem_, b, h);
        gain_ = problem_.form_tensors[kGains].at<Real>(b, h);
        is_wide_ = may_exceed_reals();
        std::fill_n(nearest_, problem_.n_query, 0);
        if (!sums_) return;
        std::fill_n(sums_, segments_.count, Sums{});
        std::fill_n(slope_gradients_, segments_.count, 0);
        std::fill_n(intercept_gradients_, segments_.count, 0);
        std::fill_n(gain_gradients_, problem_.n_query, 0);
        first_segment_ = segments_.count, last_segment_ = -1;
    }

    void begin_tile(Range keys) { table_.begin_tile(keys); }

    template <class Function>
    BFA_INLINE void with_row(int64_t query, Function function) const {
        is_wide_ ? function(WideRow(*this, query, gain_[query]))
                 : function(Row(*this, query, gain_[query]));
    }

    template <class AnyRow>
    BFA_INLINE void add_gradient(AnyRow& row, int column, Vector<Real> gradient) {
        row.add_gradient(column, gradient);
    }
    template <class AnyRow>
    BFA_INLINE void end_row(AnyRow& row, int r) {
        row.leave();
        store(row_gain_gradients_ + r * kLane, row.gain_gradient());
    }
    void end_rows(Range queries) {
        alignas(64) Real gradients[kLane];
        store(gradients, sums_of_lanes(row_gain_gradients_));
        for (int64_t i = queries.begin; i < queries.end; ++i)
            gain_gradients_[i] += gradients[i - queries.begin];
    }
    void end_block(Range) {
        for (int s = first_segment_; s <= last_segment_; ++s) {
            intercept_gradients_[s] += reduce_sum<Real>(sums_[s].gradient);
            slope_gradients_[s] += reduce_sum<Real>(sums_[s].gradient_x);
            sums_[s] = Sums{};
        }
        first_segment_ = segments_.count, last_segment_ = -1;
    }
    void end_head(const FormTensor* gradients, int64_t b, int64_t h) {
        table_.end_head(gradients[kTable], b, h);
        Real *gain = gradients[kGains].at<Real>(b, h), *slopes = gradients[kSlopes].at<Real>(b, h),
             *intercepts = gradients[kIntercepts].at<Real>(b, h);
        for (int64_t i = 0; i < problem_.n_query; ++i) gain[i] += Real(gain_gradients_[i]);
        for (int s = 0; s < segments_.count; ++s) {
            slopes[s] += Real(slope_gradients_[s]);
            intercepts[s] += Real(intercept_gradients_[s]);
        }
    }

private:
    // Whether a product of finite numbers may exceed the largest Real, which is rare.
    bool may_exceed_reals() const {
        constexpr double kFarBelow = 0x1p100;
        const double slope = largest_finite(segments_.slopes, segments_.count),
                     gain = largest_finite(gain_, problem_.n_query), t = table_.largest();
        return std::max(gain * t, 1.0) * std::max(slope, 1.0) > kFarBelow ||
               largest_finite(segments_.intercepts, segments_.count) > kFarBelow;
    }

    BFA_INLINE void add(int segment, Vector<Real> gradient, Vector<Real> gradient_x) const {
        sums_[segment].gradient += gradient;
        sums_[segment].gradient_x += gradient_x;
        first_segment_ = std::min(first_segment_, segment);
        last_segment_ = std::max(last_segment_, segment);
    }

    const Problem& problem_;
    DistanceTable<Real> table_;
    Segments<Real> segments_;
    int* nearest_;              // the segment where each query's search begins
    Sums* sums_;                // of the current block of queries
    Real* row_gain_gradients_;  // one vector per row
    double *slope_gradients_, *intercept_gradients_, *gain_gradients_;
    const Real* gain_ = nullptr;
    bool is_wide_ = false;                               // whether rows are wide
    mutable int first_segment_ = 0, last_segment_ = -1;  // the range of segments with sums
};

template <class Real>
class Normalized::Page final : public PageBias<Real> {
    using PageBias<Real>::p_, PageBias<Real>::block_;

public:
    Page(Arena& arena, const Decode& problem, int rows)
        : PageBias<Real>(problem), queries_(arena.take<Query>(rows)) {}

    void begin_block(const RowBlock& block) override {
        PageBias<Real>::begin_block(block);
        const FormTensor& gains = p_.form_tensors[kGains];
        for (int r = 0; r < block.rows; ++r)
            queries_[r] = {double(*this->template query_values<Real>(gains, r)), 0};
    }

    // In float64, so that tiles may be skipped by bounds that ignore its rounding errors.
    void fill(int row, Range keys, const PageSlot&, Range visible, Real* out) const override {
        const int64_t h = block_->head(row);
        const Segments<Real> function = segments<Real>(p_, block_->b, h);
        const Real* table = p_.form_tensors[kTable].template at<Real>(block_->b, h) +
                            (block_->position(row) - keys.begin);
        auto& [gain, segment] = queries_[row];
        for (int64_t c = visible.begin; c < visible.end; ++c) {
            const double x = gain * double(table[-c]);
            segment = function.find(x, segment);
            out[c] = in_base_2<Real>(function.value(x, segment));
        }
    }

    double highest(int row, Range keys, const PageSlot&) const override {
        const int64_t b = block_->b, h = block_->head(row);
        const auto distances = this->distances(row, keys);
        const double gain = queries_[row].gain,
                     low = -gain * this->largest_in_blocks(p_.table_lowest.template at<Real>(b, h),
                                                           distances, -1),
                     high = gain * this->largest_in_blocks(p_.table_highest.template at<Real>(b, h),
                                                           distances, 1);
        return segments<Real>(p_, b, h).maximum(std::min(low, high), std::max(low, high));
    }

private:
    struct Query {
        double gain;
        int segment;  // where a search begins
    };

    Query* queries_;
};

}  // namespace bfa::BFA_KERNELS
