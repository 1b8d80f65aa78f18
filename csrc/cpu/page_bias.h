// Evaluates each form of a bias for a query and a tile of a page, and bounds it from above.
#pragma once

#include <cmath>

#include "arithmetic.h"
#include "math.h"
#include "pages.h"
#include "segments.h"
#include "workspace.h"

namespace bfa::BFA_KERNELS {

template <class Real>
class PageBias {
public:
    PageBias(Arena& arena, const Decode& problem, int rows)
        : p_(problem),
          cumulative_(p_.form == Form::cumulative || p_.form == Form::log1p_square),
          normalized_(p_.form == Form::normalized),
          relative_(p_.form == Form::relative || p_.form == Form::relative_last),
          heads_(arena.take<Head>(problem.group())),
          queries_(arena.take<Query>(cumulative_ || normalized_ || relative_ ? rows : 0)) {}

    void begin_block(const RowBlock& block) {
        block_ = &block;
        for (int64_t g = 0; g < p_.group(); ++g) {
            const int64_t h = block.first_head + g;
            if (p_.form == Form::linear || p_.form == Form::distance || normalized_)
                heads_[g].values = p_.form_tensors[0].at<Real>(block.b, h);
            heads_[g].lowest = p_.table_lowest.at<Real>(block.b, h);
            heads_[g].highest = p_.table_highest.at<Real>(block.b, h);
            if (normalized_) heads_[g].function = Segments<Real>::of_head(p_, block.b, h);
        }
        for (int r = 0; relative_ && r < block.rows; ++r) queries_[r].norm = query_norm(r);
        for (int r = 0; (cumulative_ || normalized_) && r < block.rows; ++r) {
            const int64_t h = block.head(r), position = block.position(r);
            const View& gain = p_.form_tensors[1];
            queries_[r].segment = 0;
            queries_[r].gain = gain.data ? double(gain.at<Real>(block.b, h)[block.query(r)]) : 1.0;
            if (cumulative_)
                queries_[r].sum = position < 0 ? 0
                                               : *row_at<double>(p_.form_tensors[0],
                                                                 slot_of(p_, block.b, position), h);
        }
    }

    // Sets out[c] to the bias in base 2, for the visible columns c of the tile `keys`.
    void fill(int row, Range keys, const PageSlot& slot, Range visible, Real* out) const {
        const int begin = int(visible.begin), end = int(visible.end);
        switch (p_.form) {
            case Form::none: return;
            case Form::linear: return fill_linear(row, keys, begin, end, out);
            case Form::distance: return fill_distance(row, keys, begin, end, out);
            case Form::cumulative:
            case Form::log1p_square: return fill_cumulative(row, slot, begin, end, out);
            case Form::dense: return fill_dense(row, keys, begin, end, out);
            case Form::normalized: return fill_normalized(row, keys, begin, end, out);
            case Form::relative:
            case Form::relative_last: return fill_relative(row, keys, slot, begin, end, out);
        }
    }

    // Returns an upper bound on the bias of the keys of the tile, in natural logarithms.
    double highest(int row, Range keys, const PageSlot& slot) const {
        const int64_t position = block_->position(row),
                      near = std::min(position - keys.end + 1, p_.window - 1),
                      far = std::min(position - keys.begin, p_.window - 1);
        switch (p_.form) {
            case Form::linear: {
                const double slope = -double(*head(row).values);
                return slope * double(slope < 0 ? near : far);
            }
            case Form::distance: return largest_in_blocks(head(row).highest, near, far, 1);
            case Form::cumulative:
            case Form::log1p_square: return highest_cumulative(row, slot);
            case Form::normalized: return highest_normalized(row, near, far);
            case Form::relative:
            case Form::relative_last: return highest_relative(row, slot, near, far);
            case Form::none:
            case Form::dense: break;
        }
        return 0;
    }

private:
    static constexpr int kLane = kLanes<Real>;
    struct Head {
        const Real *values, *lowest, *highest;
        Segments<Real> function;
    };
    struct Query {
        double sum, gain, norm;
        int segment;  // where a search begins
    };

    void fill_linear(int row, Range keys, int begin, int end, Real* out) const {
        const Real distance = Real(block_->position(row) - keys.begin);
        const Vector<Real> slope = broadcast(-*head(row).values * Real(kLog2e));
        for (int c = begin / kLane * kLane; c < end; c += kLane)
            store(out + c, slope * (broadcast(distance - Real(c)) - iota<Real>()));
    }

    void fill_distance(int row, Range keys, int begin, int end, Real* out) const {
        const Real* table = head(row).values + (block_->position(row) - keys.begin);
        for (int c = begin; c < end; ++c) out[c] = table[-c] * Real(kLog2e);
    }

    // In float64, so that tiles may be skipped by bounds that ignore its rounding errors.
    void fill_normalized(int row, Range keys, int begin, int end, Real* out) const {
        const Segments<Real>& function = head(row).function;
        const Real* table = head(row).values + (block_->position(row) - keys.begin);
        int& segment = queries_[row].segment;
        for (int c = begin; c < end; ++c) {
            const double x = queries_[row].gain * double(table[-c]);
            segment = function.find(x, segment);
            out[c] = Real(function.value(x, segment) * kLog2e);
        }
    }

    // In float64, as above.
    void fill_relative(int row, Range keys, const PageSlot& slot, int begin, int end,
                       Real* out) const {
        double sums[kTile] = {};
        add_query_products(row, keys, begin, end, sums);
        add_key_products(row, keys, slot, begin, end, sums);
        for (int c = begin; c < end; ++c) out[c] = Real(sums[c] * kLog2e);
    }

    void fill_dense(int row, Range keys, int begin, int end, Real* out) const {
        const FormTensor& tensor = p_.form_tensors[0];
        const char* values = tensor.at<char>(block_->b, block_->head(row), block_->query(row)) +
                             keys.begin * tensor.column;
        for (int c = begin; c < end; ++c)
            read_row(tensor.element, values + c * tensor.column, 1, out + c);
        for (int c = begin; c < end; ++c) out[c] *= Real(kLog2e);
    }

    // Prefix sums are subtracted in float64, which is exact for near pairs at any position.
    void fill_cumulative(int row, const PageSlot& slot, int begin, int end, Real* out) const {
        const double *sums = row_at<double>(p_.form_tensors[0], slot, block_->head(row)),
                     sum = queries_[row].sum, gain = queries_[row].gain;
        for (int c = begin; c < end; ++c) out[c] = Real(gain * (sum - sums[c]));
        for (int c = begin / kLane * kLane; c < end; c += kLane) {
            const Vector<Real> beta = load(out + c);
            store(out + c,
                  p_.form == Form::cumulative ? beta * Real(kLog2e) : -log2_1p(beta * beta));
        }
    }

    double highest_cumulative(int row, const PageSlot& slot) const {
        const int64_t h = block_->head(row);
        const double low = *tile_at<double>(p_.lowest, slot, h),
                     high = *tile_at<double>(p_.highest, slot, h);
        const double from_low = queries_[row].gain * (queries_[row].sum - low),
                     from_high = queries_[row].gain * (queries_[row].sum - high);
        if (p_.form == Form::cumulative) return std::max(from_low, from_high);
        if ((from_low < 0) != (from_high < 0)) return 0;
        const double least = std::min(std::abs(from_low), std::abs(from_high));
        return -std::log1p(least * least);
    }

    double highest_normalized(int row, int64_t near, int64_t far) const {
        const double gain = queries_[row].gain,
                     low = -gain * largest_in_blocks(head(row).lowest, near, far, -1),
                     high = gain * largest_in_blocks(head(row).highest, near, far, 1);
        return head(row).function.maximum(std::min(low, high), std::max(low, high));
    }

    // |U . P[d]| <= |U| |P[d]|, and |W . Q[d]| <= |W| |Q[d]|.
    double highest_relative(int row, const PageSlot& slot, int64_t near, int64_t far) const {
        const int64_t last = p_.form_tensors[1].columns - 1;
        if (p_.form == Form::relative && near > last) return 0;
        const int64_t first = std::min(near, last), end = std::min(far, last);
        double bound = queries_[row].norm * largest_in_blocks(head(row).highest, first, end, 1);
        if (p_.form_tensors[3].rows > 0)
            bound += double(*tile_at<Real>(p_.highest, slot, block_->head(row))) *
                     largest_in_blocks(head(row).lowest, first, end, 1);
        return bound;
    }

    // The norm of U, rounded up by more than the errors of the products.
    double query_norm(int row) const {
        const FormTensor& factors = p_.form_tensors[0];
        const char* query = factors.at<char>(block_->b, block_->head(row), block_->query(row));
        double squares = 0;
        with_element<Real>(factors.element, [&](auto type) {
            for (int64_t r = 0; r < p_.form_tensors[1].rows; ++r) {
                const double x = number<decltype(type)>(query + r * factors.column);
                squares += x * x;
            }
        });
        return std::sqrt(squares) * (1 + 0x1p-16);
    }

    // Adds U . P[d] of one query to the columns of a tile, whose distances decrease.
    void add_query_products(int row, Range keys, int begin, int end, double* out) const {
        const FormTensor &factors = p_.form_tensors[0], &table = p_.form_tensors[1];
        const int64_t h = block_->head(row), distance = block_->position(row) - keys.begin,
                      last = table.columns - 1;
        const int inside = int(std::clamp<int64_t>(distance - last, begin, end));
        const char* query = factors.at<char>(block_->b, h, block_->query(row));
        with_element<Real>(table.element, [&](auto type) {
            using Number = decltype(type);
            for (int64_t r = 0; r < table.rows; ++r) {
                const double factor = number<Number>(query + r * factors.column);
                const char* values = table.at<char>(block_->b, h, r);
                if (p_.form == Form::relative_last) {
                    const double beyond = factor * number<Number>(values + last * table.column);
                    for (int c = begin; c < inside; ++c) out[c] += beyond;
                }
                for (int c = inside; c < end; ++c)
                    out[c] += factor * number<Number>(values + (distance - c) * table.column);
            }
        });
    }

    // Adds W . Q[d] of each key; slot is that of the tile.
    void add_key_products(int row, Range keys, const PageSlot& slot, int begin, int end,
                          double* out) const {
        const FormTensor &factors = p_.form_tensors[2], &table = p_.form_tensors[3];
        const int64_t h = block_->head(row);
        if (table.rows == 0) return;
        const char* vectors = row_at(factors, slot, h);
        with_element<Real>(table.element, [&](auto type) {
            using Number = decltype(type);
            for (int c = begin; c < end; ++c) {
                const int64_t distance = block_->position(row) - keys.begin - c;
                const int64_t column = std::min(distance, table.columns - 1);
                if (p_.form == Form::relative && column != distance) continue;
                const char* vector = vectors + c * factors.row;
                const char* values = table.at<char>(block_->b, h) + column * table.column;
                for (int64_t r = 0; r < table.rows; ++r)
                    out[c] += number<Number>(vector + r * factors.column) *
                              number<Number>(values + r * table.row);
            }
        });
    }

    template <class Number>
    static double number(const char* address) {
        return double(to_real(*reinterpret_cast<const Number*>(address)));
    }

    // Returns the maximum of sign * extremes[x] over the blocks that hold the distances near to
    // far.
    static double largest_in_blocks(const Real* extremes, int64_t near, int64_t far, Real sign) {
        int64_t x = near / constants::PEAK_DISTANCES;
        Real largest = sign * extremes[x];
        while (++x <= far / constants::PEAK_DISTANCES)
            largest = std::max(largest, sign * extremes[x]);
        return double(largest);
    }

    const Head& head(int row) const { return heads_[block_->head(row) - block_->first_head]; }

    const Decode& p_;
    const bool cumulative_, normalized_, relative_;
    Head* heads_;
    Query* queries_;
    const RowBlock* block_ = nullptr;
};

}  // namespace bfa::BFA_KERNELS
