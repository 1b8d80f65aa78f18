// The cumulative forms: beta = gain_i (sums_p - sums_j), negated where j > p; the bias is beta, or
// -log(1 + beta^2).
#pragma once

#include "base.h"

namespace bfa::BFA_KERNELS {

struct CumulativeTensors {
    enum Tensor { kSums, kGains };
};

template <bool kLogSquare>
struct CumulativeForm : FormDefaults<CumulativeForm<kLogSquare>>, CumulativeTensors {
    static constexpr FormTraits traits = {
        kLogSquare ? "log1p_square" : "cumulative",
        {{"steps", rows::per_position, Refused::nan}, {"gains", rows::per_query, Refused::nan}}};

    template <class Real>
    class Tile;
    template <class Real>
    class Page;
};

using Cumulative = CumulativeForm<false>;
using Log1pSquare = CumulativeForm<true>;

// beta of -log(1 + beta^2), saturated, so that its square is finite.
template <class Real>
BFA_INLINE Vector<Real> limited_beta(Vector<Real> beta) {
    constexpr Real kLargest = Real(constants::LARGEST_GAIN);
    beta = beta > kLargest ? broadcast(kLargest) : beta;
    return beta < -kLargest ? broadcast(-kLargest) : beta;
}

// The prefix sums are float64. A tile uses their differences from that of its first key, rounded to
// Real. Where these are too large to resolve neighboring keys, it also adds their rounding errors.
template <bool kLogSquare>
template <class Real>
class CumulativeForm<kLogSquare>::Tile : public TileDefaults {
public:
    // kSimple: causal, and without the rounding errors. Without kGain, the gain is 1.
    template <bool kSimple, bool kGain>
    struct Row {
        Vector<Real> gain, gain_in_base_2, sum, scaled_sum, sum_rounding, distance_to_tile;
        const Real *key_sums, *key_roundings;
        Real* key_gradient;
        Vector<Real> sum_gradient, gain_gradient;

        BFA_INLINE Vector<Real> negate_future(Vector<Real> x, int column) const {
            if constexpr (kSimple) return x;
            return distance_to_tile < iota<Real>() + Real(column) ? -x : x;
        }
        BFA_INLINE Vector<Real> difference(int column) const {
            const Vector<Real> x = sum - load(key_sums + column);
            if constexpr (kSimple) return x;
            return negate_future(x + (sum_rounding - load(key_roundings + column)), column);
        }
        BFA_INLINE Vector<Real> added_to(Vector<Real> s, int column) const {
            if constexpr (kLogSquare) {
                const Vector<Real> beta = limited_beta<Real>(gain * difference(column));
                return s - log2_1p(beta * beta);
            } else if constexpr (kSimple) {
                return s + scaled_sum - gain_in_base_2 * load(key_sums + column);
            } else {
                return s + gain_in_base_2 * difference(column);
            }
        }
    };

    Tile(Arena& arena, const Problem& problem, bool with_gradient)
        : problem_(problem),
          key_sums_(arena.take<Real>(kTile)),
          key_roundings_(arena.take<Real>(kTile)),
          key_gradient_(arena.take<Real>(kTile)),
          row_sum_gradients_(arena.take<Real>(with_gradient ? kLane * kLane : 0)),
          row_gain_gradients_(arena.take<Real>(with_gradient ? kLane * kLane : 0)),
          sum_gradient_(with_gradient ? arena.take<double>(problem.n_key + problem.shift)
                                      : nullptr),
          gain_gradient_(with_gradient ? arena.take<double>(problem.n_query) : nullptr) {}

    void begin_head(int64_t b, int64_t h) {
        const FormTensor &sums = problem_.form_tensors[kSums],
                         &gains = problem_.form_tensors[kGains];
        sums_ = sums.at<double>(b, h);
        gain_ = gains.data ? gains.at<Real>(b, h) : nullptr;
        if (sum_gradient_) {
            std::memset(sum_gradient_, 0, sums.rows * sizeof(double));
            std::memset(gain_gradient_, 0, problem_.n_query * sizeof(double));
        }
    }

    void begin_tile(Range keys) {
        tile_begin_ = keys.begin;
        // The prefix sum of the first key, so that no row depends on steps after its own position.
        origin_ = std::isfinite(sums_[keys.begin]) ? sums_[keys.begin] : 0;
        Real largest = 0;
        for (int64_t c = 0; c < kTile; ++c) {
            const double sum = keys.begin + c < keys.end ? sums_[keys.begin + c] - origin_ : 0;
            key_sums_[c] = Real(sum);
            key_roundings_[c] = rounding(sum);
            largest = std::max(largest, std::abs(key_sums_[c]));
        }
        // At LARGEST_SUM the rounding error of a float is 4e-6.
        simple_ = problem_.causal && largest <= Real(constants::LARGEST_SUM);
        std::memset(key_gradient_, 0, kTile * sizeof(Real));
    }

    template <class Function>
    BFA_INLINE void with_row(int64_t query, Function function) const {
        if (!simple_) return function(row<false, true>(query));
        gain_ ? function(row<true, true>(query)) : function(row<true, false>(query));
    }

    template <bool kSimple, bool kGain>
    BFA_INLINE void add_gradient(Row<kSimple, kGain>& row, int column, Vector<Real> gradient) {
        if constexpr (kLogSquare) {
            const Vector<Real> beta = row.gain * row.difference(column);
            gradient *= Real(-2) * beta / (Real(1) + beta * beta);
            gradient = abs<Real>(beta) <= Real(constants::LARGEST_GAIN) ? gradient : Vector<Real>{};
        }
        if constexpr (kGain) row.gain_gradient += gradient * row.difference(column);
        gradient = row.negate_future(gradient, column);
        row.sum_gradient += gradient;
        store(row.key_gradient + column, load(row.key_gradient + column) - gradient * row.gain);
    }
    template <bool kSimple, bool kGain>
    BFA_INLINE void end_row(const Row<kSimple, kGain>& row, int r) {
        store(row_sum_gradients_ + r * kLane, row.sum_gradient);
        if constexpr (kGain) store(row_gain_gradients_ + r * kLane, row.gain_gradient);
    }
    void end_rows(Range queries) {
        const int rows = int(queries.end - queries.begin);
        alignas(64) Real gradients[kLane];
        store(gradients, sums_of_lanes(row_sum_gradients_));
        const int64_t position = problem_.position(queries.begin);
        for (int r = 0; r < rows; ++r) {
            const double gradient = double(gradients[r]) * gain(queries.begin + r);
            block_gradient_ += gradient;
            if (position + r >= 0) sum_gradient_[position + r] += gradient;
        }
        if (!gain_) return;
        store(gradients, sums_of_lanes(row_gain_gradients_));
        for (int r = 0; r < rows; ++r) gain_gradient_[queries.begin + r] += gradients[r];
    }
    void end_block(Range keys) {
        for (int64_t j = keys.begin; j < keys.end; ++j) {
            sum_gradient_[j] += key_gradient_[j - keys.begin];
            block_gradient_ += key_gradient_[j - keys.begin];
        }
        // The rows and the columns of a block sum the same terms with opposite signs. The gradient
        // of every earlier step contains both sums, and would contain how they are rounded.
        sum_gradient_[keys.begin] -= block_gradient_;
        block_gradient_ = 0;
        std::memset(key_gradient_, 0, kTile * sizeof(Real));
    }
    void end_head(const FormTensor* gradients, int64_t b, int64_t h) {
        double* sums = gradients[kSums].at<double>(b, h);
        for (int64_t j = 0; j < gradients[kSums].rows; ++j) sums[j] += sum_gradient_[j];
        if (!gain_) return;
        Real* gain = gradients[kGains].at<Real>(b, h);
        for (int64_t i = 0; i < problem_.n_query; ++i) gain[i] += Real(gain_gradient_[i]);
    }

private:
    static constexpr int kLane = kLanes<Real>;

    template <bool kSimple, bool kGain>
    BFA_INLINE Row<kSimple, kGain> row(int64_t query) const {
        const int64_t position = problem_.position(query);
        const double sum = (position < 0 ? 0.0 : sums_[position]) - origin_;
        const Real gain = kGain ? this->gain(query) : Real(1);
        const Real gain_in_base_2 = gain * Real(kLog2e);
        return {broadcast(gain),
                broadcast(gain_in_base_2),
                broadcast(Real(sum)),
                broadcast(Real(gain_in_base_2 * sum)),
                kSimple ? Vector<Real>{} : broadcast(rounding(sum)),
                broadcast(Real(position - tile_begin_)),
                key_sums_,
                key_roundings_,
                key_gradient_,
                Vector<Real>{},
                Vector<Real>{}};
    }

    static Real rounding(double x) { return std::isfinite(Real(x)) ? Real(x - Real(x)) : Real(0); }
    Real gain(int64_t query) const { return gain_ ? limited_gain(gain_[query]) : Real(1); }

    const Problem& problem_;
    const double* sums_;
    const Real* gain_;
    int64_t tile_begin_;
    double origin_;
    bool simple_;
    Real *key_sums_, *key_roundings_;
    Real* key_gradient_;
    Real *row_sum_gradients_, *row_gain_gradients_;  // one vector per row
    double* sum_gradient_;
    double* gain_gradient_;
    double block_gradient_ = 0;  // of a block's rows and columns together: 0 up to rounding
};

template <bool kLogSquare>
template <class Real>
class CumulativeForm<kLogSquare>::Page final : public PageBias<Real> {
    using PageBias<Real>::p_, PageBias<Real>::block_;

public:
    Page(Arena& arena, const Decode& problem, int rows)
        : PageBias<Real>(problem), queries_(arena.take<Query>(rows)) {}

    void begin_block(const RowBlock& block) override {
        PageBias<Real>::begin_block(block);
        const FormTensor &sums = p_.form_tensors[kSums], &gains = p_.form_tensors[kGains];
        for (int r = 0; r < block.rows; ++r) {
            const int64_t position = block.position(r);
            queries_[r].gain =
                gains.data ? double(limited_gain(*this->template query_values<Real>(gains, r)))
                           : 1.0;
            queries_[r].sum =
                position < 0 ? 0
                             : *row_at<double>(sums, slot_of(p_, block.b, position), block.head(r));
        }
    }

    // Prefix sums are subtracted in float64, which is exact for near pairs at any position.
    void fill(int row, Range, const PageSlot& slot, Range visible, Real* out) const override {
        const double* sums = row_at<double>(p_.form_tensors[kSums], slot, block_->head(row));
        const auto [sum, gain] = queries_[row];
        for (int64_t c = visible.begin; c < visible.end; ++c) out[c] = Real(gain * (sum - sums[c]));
        for (int c = int(visible.begin) / kLane * kLane; c < visible.end; c += kLane) {
            const Vector<Real> beta =
                kLogSquare ? limited_beta<Real>(load(out + c)) : load(out + c);
            store(out + c, kLogSquare ? -log2_1p(beta * beta) : beta * Real(kLog2e));
        }
    }

    double highest(int row, Range, const PageSlot& slot) const override {
        const int64_t h = block_->head(row);
        const auto [sum, gain] = queries_[row];
        const double from_low = gain * (sum - *tile_at<double>(p_.lowest, slot, h)),
                     from_high = gain * (sum - *tile_at<double>(p_.highest, slot, h));
        if (!kLogSquare) return std::max(from_low, from_high);
        if ((from_low < 0) != (from_high < 0)) return 0;
        const double least =
            std::min({std::abs(from_low), std::abs(from_high), constants::LARGEST_GAIN});
        return -std::log1p(least * least);
    }

private:
    static constexpr int kLane = kLanes<Real>;
    struct Query {
        double sum, gain;
    };

    Query* queries_;
};

}  // namespace bfa::BFA_KERNELS
