// The vectors of all distances of one head: a table (R, n) of the relative form.
//
// A place is a column of the table in the order in which a product needs them, plus kPadding. The
// places before the first column and after the last one hold zeros, or the nearest column.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../gemm.h"
#include "../../visibility.h"
#include "../base.h"
#include "tensors.h"

namespace bfa::BFA_KERNELS {

template <class Arithmetic>
class DistanceVectors {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    static constexpr int kPair = Arithmetic::pair, kLane = kLanes<Real>;

public:
    static constexpr int64_t kSpan = 192;  // the places that a product may use

    // tensor: the index of the form's (1, H or 1, R, n) tensor. is_reversed: whether places are in
    // the order of decreasing distances.
    DistanceVectors(Arena& arena, const Problem& problem, int tensor, bool is_reversed,
                    bool with_gradient)
        : problem_(problem),
          tensor_(tensor),
          is_reversed_(is_reversed),
          with_gradient_(with_gradient),
          repeats_ends_(RelativeTensors::repeats_ends(problem)),
          rank_(problem.form_tensors[tensor].rows),
          count_(problem.form_tensors[tensor].columns),
          places_(exists() ? count_ + 2 * kPadding : 0),
          panels_(arena.take<Operand>(panels() * panel_elements())),
          rows_of_span_(arena.take<Operand>(with_gradient ? kSpan * panel_rows() : 0)),
          pairs_of_span_(kPair == 1
                             ? rows_of_span_
                             : arena.take<Operand>(with_gradient ? kSpan / kPair * columns() : 0)),
          ends_(arena.take<Real>(2 * columns())),
          rows_(arena.take<Real>(kPair * row_elements())) {}

    bool exists() const { return rank_ > 0; }
    int64_t rank() const { return rank_; }
    int64_t depth() const { return round_up(rank_, kPair) / kPair; }
    int64_t columns() const { return round_up(rank_, kLane); }

    // The gradient of the vectors is in memory of the caller, who clears it for each head.
    int64_t gradient_elements() const { return with_gradient_ ? places_ * columns() : 0; }
    void keep_gradient_in(Real* gradient) { gradient_ = gradient; }

    // Returns whether the vectors are others than before.
    bool begin_head(int64_t b, int64_t h) {
        const char* table = problem_.form_tensors[tensor_].at<char>(b, h);
        if (table == table_) return false;
        table_ = table;
        all_finite_ = true;
        std::memset(ends_, 0, 2 * columns() * sizeof(Real));
        for (int64_t r = 0; r < panel_rows() * kPair; ++r) {
            Real* row = rows_ + r % kPair * row_elements();
            if (r < rank_) {
                read_row_of_places(b, h, r, row);
                if (with_gradient_)
                    all_finite_ &=
                        std::isfinite(Plain<Real>::largest_magnitude(row, row_elements()));
                ends_[r] = row[0];
                ends_[columns() + r] = row[places_ - 1];
            } else {
                std::memset(row, 0, row_elements() * sizeof(Real));
            }
            if (r % kPair == kPair - 1) fill_panels(r / kPair);
        }
        return true;
    }

    bool all_finite() const { return all_finite_; }

    // The first place of a span that begins, in the order of places, with `distance`.
    int64_t place_of(int64_t distance) const {
        const int64_t column = distance - (problem_.causal ? 0 : -(count_ / 2));
        const int64_t place = kPadding + (is_reversed_ ? count_ - 1 - column : column);
        return std::clamp<int64_t>(place, 0, places_ - kSpan);
    }

    // 0 or 1 if the whole span is before the first column or after the last one, otherwise -1.
    int end_of(int64_t place) const {
        if (place + kSpan <= kPadding) return 0;
        return place >= kPadding + count_ ? 1 : -1;
    }
    // The first place of a span before the first column or after the last one.
    int64_t place_beyond(int index) const { return index ? places_ - kSpan : 0; }
    // The vector of all these places.
    const Real* end(int index) const { return ends_ + index * columns(); }

    // For products that contract the ranks.
    RightMatrix<Operand> contracting_ranks(int64_t place) const {
        const int64_t panel = place / kPanelStep;
        return {panels_ + panel * panel_elements() + place % kPanelStep, kPanel};
    }
    // For products that contract places, of which `count` are transposed at each call: a transposed
    // copy of the whole table would need as much memory as the panels. Valid until the next call.
    RightMatrix<Operand> contracting_places(int64_t even_place, int count) const {
        const RightMatrix<Operand> source = contracting_ranks(even_place);
        transpose(source.data, panel_rows(), count, source.stride, rows_of_span_, panel_rows());
        if constexpr (kPair == 2)
            Arithmetic::pack_row_pairs(Element::bfloat16, reinterpret_cast<char*>(rows_of_span_),
                                       panel_rows() * sizeof(Operand), count, columns(),
                                       pairs_of_span_, columns());
        return {pairs_of_span_, columns()};
    }
    Result<Real> gradient(int64_t place) const {
        return {gradient_ + place * columns(), columns()};
    }
    Real* end_gradient(int index) const {
        return gradient_ + (index ? places_ - 1 : 0) * columns();
    }

    // Adds the gradient of the table to the output.
    void end_head(const FormTensor& output, int64_t b, int64_t h) const {
        constexpr int64_t kFirst = kPadding;
        const int64_t end = kFirst + count_;
        if (repeats_ends_) {
            add_gradients({0, kFirst}, kFirst);
            add_gradients({end, places_}, end - 1);
        }
        constexpr int64_t kBlock = 64;  // places whose gradients stay in the L1 cache
        const int64_t step = is_reversed_ ? -1 : 1;
        with_element<Real>(output.element, [&](auto type) {
            for (int64_t begin = kFirst; begin < end; begin += kBlock)
                for (int64_t r = 0; r < rank_; ++r) {
                    auto* out = output.at<decltype(type)>(b, h, r) + column_of(begin);
                    const Real* gradient = gradient_ + begin * columns() + r;
                    for (int64_t x = 0; x < std::min(kBlock, end - begin); ++x)
                        from_real(to_real(out[x * step]) + gradient[x * columns()], out[x * step]);
                }
        });
    }

private:
    // A product reads its places from one panel, whose rows are closer to each other in memory than
    // those of the whole table would be. The panels overlap by kSpan places.
    static constexpr int64_t kPanelStep = 1024, kPanel = kPanelStep + kSpan;
    static constexpr int64_t kPadding = 2 * kSpan;

    int64_t panels() const { return round_up(places_, kPanelStep) / kPanelStep; }
    // Squares of vectors are transposed, so zeros follow the ranks.
    int64_t panel_rows() const { return with_gradient_ ? round_up(depth(), kLane) : depth(); }
    int64_t panel_elements() const { return panel_rows() * kPanel; }
    int64_t row_elements() const { return panels() * kPanelStep + kSpan; }
    int64_t column_of(int64_t place) const {
        const int64_t column = place - kPadding;
        return is_reversed_ ? count_ - 1 - column : column;
    }

    // Adds the gradients of other places, which have the same vector, to that of `target`.
    void add_gradients(Range places, int64_t target) const {
        for (int64_t r = 0; r < rank_; ++r) {
            double sum = gradient_[target * columns() + r];
            for (int64_t place = places.begin; place < places.end; ++place)
                sum += gradient_[place * columns() + r];
            gradient_[target * columns() + r] = Real(sum);
        }
    }

    // Row r of the table in the order of the places.
    void read_row_of_places(int64_t b, int64_t h, int64_t r, Real* row) {
        const FormTensor& table = problem_.form_tensors[tensor_];
        Real *first = row + kPadding, *end = first + count_;
        with_element<Real>(table.element, [&](auto type) {
            using Element = decltype(type);
            const auto* source = table.at<char>(b, h, r);
            constexpr int64_t kContiguous = sizeof(Element);
            table.column_stride == kContiguous
                ? read_columns<Element>(source, kContiguous, first)
                : read_columns<Element>(source, table.column_stride, first);
        });
        std::fill(row, first, repeats_ends_ ? *first : 0);
        std::fill(end, row + row_elements(), repeats_ends_ ? end[-1] : 0);
    }
    template <class Element>
    BFA_INLINE void read_columns(const char* source, int64_t stride, Real* places) const {
        const auto column = [&](int64_t c) {
            return to_real(*reinterpret_cast<const Element*>(source + c * stride));
        };
        if (is_reversed_) {
            for (int64_t c = 0; c < count_; ++c) places[count_ - 1 - c] = column(c);
        } else {
            for (int64_t c = 0; c < count_; ++c) places[c] = column(c);
        }
    }

    void fill_panels(int64_t depth_index) const {
        for (int64_t panel = 0; panel < panels(); ++panel) {
            Operand* target = panels_ + panel * panel_elements() + depth_index * kPanel;
            const Real* source = rows_ + panel * kPanelStep;
            if constexpr (kPair == 1) {
                std::memcpy(target, source, kPanel * sizeof(Operand));
            } else {
                for (int64_t x = 0; x < kPanel; x += kLane)
                    store(target + x, Arithmetic::pairs_along_column(
                                          load(source + x), load(source + row_elements() + x)));
            }
        }
    }

    const Problem& problem_;
    const int tensor_;
    const bool is_reversed_, with_gradient_, repeats_ends_;
    const int64_t rank_, count_, places_;
    Operand* panels_;
    // (kSpan, panel_rows()) and (kSpan / kPair, columns()), which are the same without pairs.
    Operand *rows_of_span_, *pairs_of_span_;
    Real *ends_, *rows_, *gradient_ = nullptr;  // rows_: as many rows of places as a pair has
    const char* table_ = nullptr;               // that of the vectors
    bool all_finite_ = true;
};

}  // namespace bfa::BFA_KERNELS
