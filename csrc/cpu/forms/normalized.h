// The normalized form: bias_ij = f(gain_i table[d]), with f linear between its knots.
#pragma once

#include <algorithm>

#include "../math.h"
#include "../segments.h"
#include "../visibility.h"
#include "../workspace.h"
#include "base.h"
#include "distance_table.h"

namespace bfa::BFA_KERNELS {

// Implements the interface described in base.h. Along a row x = gain_i table[d] varies slowly, so
// that most vectors lie within one segment: the segment of the previous vector is tried first.
template <class Real>
class NormalizedBias : public BiasDefaults {
    static constexpr int kLane = kLanes<Real>;

    // The sums over the pairs of a segment that determine the gradient of its line, one per lane.
    struct Sums {
        Vector<Real> gradient, gradient_x;
    };

public:
    class Row {
    public:
        Row(const NormalizedBias& bias, int64_t query, Real gain)
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

        const NormalizedBias& bias_;
        const typename DistanceTable<Real>::Row table_;
        const Vector<Real> gain_;
        int* nearest_;
        int segment_;
        Vector<Real> lower_, upper_, slope_, intercept_, table_factor_;
        Vector<Real> gradient_sum_ = {}, gradient_t_sum_ = {}, gain_gradient_ = {};
    };

    NormalizedBias(Arena& arena, const Problem& problem, bool with_gradient)
        : problem_(problem),
          table_(arena, problem, with_gradient),
          segments_(Segments<Real>::of_head(problem, 0, 0)),
          nearest_(arena.take<int>(problem.n_query)),
          sums_(with_gradient ? arena.take<Sums>(segments_.count) : nullptr),
          row_gain_gradients_(arena.take<Real>(with_gradient ? kLane * kLane : 0)),
          slope_gradients_(arena.take<double>(with_gradient ? segments_.count : 0)),
          intercept_gradients_(arena.take<double>(with_gradient ? segments_.count : 0)),
          gain_gradients_(arena.take<double>(with_gradient ? problem.n_query : 0)) {}

    void begin_head(int64_t b, int64_t h) {
        table_.begin_head(b, h, Real(1));
        segments_ = Segments<Real>::of_head(problem_, b, h);
        gain_ = problem_.form_tensors[1].at<Real>(b, h);
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
        function(Row(*this, query, gain_[query]));
    }

    static constexpr bool has_gradient = true;

    BFA_INLINE void add_gradient(Row& row, int column, Vector<Real> gradient) {
        row.add_gradient(column, gradient);
    }
    BFA_INLINE void end_row(Row& row, int r) {
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
        table_.end_head(gradients[0], b, h);
        Real *gain = gradients[1].at<Real>(b, h), *slopes = gradients[3].at<Real>(b, h),
             *intercepts = gradients[4].at<Real>(b, h);
        for (int64_t i = 0; i < problem_.n_query; ++i) gain[i] += Real(gain_gradients_[i]);
        for (int s = 0; s < segments_.count; ++s) {
            slopes[s] += Real(slope_gradients_[s]);
            intercepts[s] += Real(intercept_gradients_[s]);
        }
    }

private:
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
    mutable int first_segment_ = 0, last_segment_ = -1;  // the range of segments with sums
};

}  // namespace bfa::BFA_KERNELS
