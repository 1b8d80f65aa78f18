// The relative form in a page of a cache, computed in float64, so that tiles may be skipped by
// bounds that ignore its rounding errors.
#pragma once

#include <cmath>

#include "../../element.h"
#include "../../math.h"
#include "../../workspace.h"
#include "../page.h"
#include "tensors.h"

namespace bfa::BFA_KERNELS {

template <class Real>
class RelativePage final : public PageBias<Real>, RelativeTensors {
    using PageBias<Real>::p_, PageBias<Real>::block_;

public:
    RelativePage(Arena& arena, const Decode& problem, int rows)
        : PageBias<Real>(problem),
          repeats_ends_(repeats_ends(problem)),
          query_norms_(arena.take<double>(rows)) {}

    void begin_block(const RowBlock& block) override {
        PageBias<Real>::begin_block(block);
        for (int r = 0; r < block.rows; ++r) query_norms_[r] = query_norm(r);
    }

    void fill(int row, Range keys, const PageSlot& slot, Range visible, Real* out) const override {
        const int begin = int(visible.begin), end = int(visible.end);
        double sums[kTile] = {};
        add_query_products(row, keys, begin, end, sums);
        add_key_products(row, keys, slot, begin, end, sums);
        for (int c = begin; c < end; ++c) out[c] = in_base_2<Real>(sums[c]);
    }

    // |U . P[d]| <= |U| |P[d]|, and |W . Q[d]| <= |W| |Q[d]|.
    double highest(int row, Range keys, const PageSlot& slot) const override {
        const int64_t b = block_->b, h = block_->head(row),
                      last = p_.form_tensors[kQueryTable].columns - 1;
        auto [nearest, farthest] = this->distances(row, keys);
        if (!repeats_ends_ && nearest > last) return 0;
        nearest = std::min(nearest, last), farthest = std::min(farthest, last);
        double bound =
            query_norms_[row] * this->largest_in_blocks(p_.table_highest.template at<Real>(b, h),
                                                        {nearest, farthest}, 1);
        if (p_.form_tensors[kKeyTable].rows > 0)
            bound += double(*tile_at<Real>(p_.highest, slot, h)) *
                     this->largest_in_blocks(p_.table_lowest.template at<Real>(b, h),
                                             {nearest, farthest}, 1);
        return bound;
    }

private:
    // The norm of U, rounded up by more than the errors of the products.
    double query_norm(int row) const {
        const FormTensor& factors = p_.form_tensors[kQueryFactors];
        const char* query = factors.at<char>(block_->b, block_->head(row), block_->query(row));
        double squares = 0;
        with_element<Real>(factors.element, [&](auto type) {
            for (int64_t r = 0; r < p_.form_tensors[kQueryTable].rows; ++r) {
                const double x = number<decltype(type)>(query + r * factors.column_stride);
                squares += x * x;
            }
        });
        return std::sqrt(squares) * (1 + 0x1p-16);
    }

    // Adds U . P[d] of one query to the columns of a tile, whose distances decrease.
    void add_query_products(int row, Range keys, int begin, int end, double* out) const {
        const FormTensor &factors = p_.form_tensors[kQueryFactors],
                         &table = p_.form_tensors[kQueryTable];
        const int64_t h = block_->head(row), distance = block_->position(row) - keys.begin,
                      last = table.columns - 1;
        const int inside = int(std::clamp<int64_t>(distance - last, begin, end));
        const char* query = factors.at<char>(block_->b, h, block_->query(row));
        with_element<Real>(table.element, [&](auto type) {
            using Number = decltype(type);
            for (int64_t r = 0; r < table.rows; ++r) {
                const double factor = number<Number>(query + r * factors.column_stride);
                const char* values = table.at<char>(block_->b, h, r);
                if (repeats_ends_) {
                    const double beyond =
                        factor * number<Number>(values + last * table.column_stride);
                    for (int c = begin; c < inside; ++c) out[c] += beyond;
                }
                for (int c = inside; c < end; ++c)
                    out[c] +=
                        factor * number<Number>(values + (distance - c) * table.column_stride);
            }
        });
    }

    // Adds W . Q[d] of each key; slot is that of the tile.
    void add_key_products(int row, Range keys, const PageSlot& slot, int begin, int end,
                          double* out) const {
        const FormTensor &factors = p_.form_tensors[kKeyFactors],
                         &table = p_.form_tensors[kKeyTable];
        const int64_t h = block_->head(row);
        if (table.rows == 0) return;
        const char* vectors = row_at(factors, slot, h);
        with_element<Real>(table.element, [&](auto type) {
            using Number = decltype(type);
            for (int c = begin; c < end; ++c) {
                const int64_t distance = block_->position(row) - keys.begin - c;
                const int64_t column = std::min(distance, table.columns - 1);
                if (!repeats_ends_ && column != distance) continue;
                const char* vector = vectors + c * factors.row_stride;
                const char* values = table.at<char>(block_->b, h) + column * table.column_stride;
                for (int64_t r = 0; r < table.rows; ++r)
                    out[c] += number<Number>(vector + r * factors.column_stride) *
                              number<Number>(values + r * table.row_stride);
            }
        });
    }

    template <class Number>
    static double number(const char* address) {
        return double(to_real(*reinterpret_cast<const Number*>(address)));
    }

    const bool repeats_ends_;
    double* query_norms_;
};

}  // namespace bfa::BFA_KERNELS
