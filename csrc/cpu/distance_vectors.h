// The vectors of all distances of one head: a table (R, n) of the relative form.
//
// A place is a column of the table in the order in which a product needs them, plus kPadding. The
// places before the first column and after the last one hold zeros, or the nearest column.
#pragma once

#include <algorithm>
#include <cstring>

#include "bias.h"
#include "gemm.h"

namespace bfa::BFA_ISA {

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
          rank_(problem.form_tensors[tensor].rows),
          count_(problem.form_tensors[tensor].columns),
          places_(exists() ? round_up(count_ + 2 * kPadding, kPanelStep) : 0),
          panels_(arena.take<Operand>(places_ / kPanelStep * depth() * kPanel)),
          along_rank_(arena.take<Operand>(with_gradient ? places_ / kPair * columns() : 0)),
          ends_(arena.take<Real>(2 * columns())),
          gradient_(arena.take<Real>(with_gradient ? places_ * columns() : 0)),
          row_(arena.take<Real>(places_ + kPanel)) {}

    bool exists() const { return rank_ > 0; }
    int64_t rank() const { return rank_; }
    int64_t depth() const { return round_up(rank_, kPair) / kPair; }
    int64_t columns() const { return round_up(rank_, kLane); }

    // Returns whether the vectors are others than before.
    bool begin_head(int64_t b, int64_t h) {
        if (with_gradient_) std::memset(gradient_, 0, places_ * columns() * sizeof(Real));
        const char* table = problem_.form_tensors[tensor_].at<char>(b, h);
        if (table == table_) return false;
        table_ = table;
        std::memset(panels_, 0, places_ / kPanelStep * depth() * kPanel * sizeof(Operand));
        std::memset(ends_, 0, 2 * columns() * sizeof(Real));
        for (int64_t r = 0; r < rank_; ++r) {
            read_row_of_places(b, h, r);
            for (int64_t panel = 0; panel < places_ / kPanelStep; ++panel) {
                Operand* target = panels_ + (panel * depth() + r / kPair) * kPanel;
                for (int64_t x = 0; x < kPanel; ++x)
                    set(target[x], r % kPair, row_[panel * kPanelStep + x]);
            }
            ends_[r] = row_[0];
            ends_[columns() + r] = row_[places_ - 1];
        }
        if (with_gradient_) fill_along_rank();
        return true;
    }

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
    // The vector of all places before the first column or after the last one.
    const Real* end(int index) const { return ends_ + index * columns(); }

    // For products that contract the ranks, and those that contract the places.
    RightMatrix<Operand> of_places(int64_t place) const {
        const int64_t panel = place / kPanelStep;
        return {panels_ + panel * depth() * kPanel + place % kPanelStep, kPanel};
    }
    RightMatrix<Operand> of_ranks(int64_t even_place) const {
        return {along_rank_ + even_place / kPair * columns(), columns()};
    }
    Result<Real> gradient(int64_t place) const {
        return {gradient_ + place * columns(), columns()};
    }
    Real* end_gradient(int index) const {
        return gradient_ + (index ? places_ - 1 : 0) * columns();
    }

    void end_head(const FormTensor& gradient, int64_t b, int64_t h) const {
        for (int64_t begin = 0; begin < places_; begin += kLane)
            for (int64_t r = 0; r < rank_; ++r) {
                Real* out = gradient.at<Real>(b, h, r);
                for (int64_t place = begin; place < begin + kLane; ++place) {
                    const int64_t column = column_of(place), nearest = nearest_of(column);
                    if (column == nearest || repeats_ends())
                        out[nearest] += gradient_[place * columns() + r];
                }
            }
    }

private:
    // A product reads its places from one panel. The panels overlap by kSpan places, and their rows
    // are near each other: those of the whole table would each be in another page of memory.
    static constexpr int64_t kPanelStep = 128, kPanel = kPanelStep + kSpan;
    static constexpr int64_t kPadding = 2 * kSpan;

    bool repeats_ends() const { return problem_.form == Form::relative_last; }
    int64_t column_of(int64_t place) const {
        const int64_t column = place - kPadding;
        return is_reversed_ ? count_ - 1 - column : column;
    }
    int64_t nearest_of(int64_t column) const { return std::clamp<int64_t>(column, 0, count_ - 1); }

    void read_row_of_places(int64_t b, int64_t h, int64_t r) {
        const FormTensor& table = problem_.form_tensors[tensor_];
        const char* source = table.at<char>(b, h, r);
        with_element<Real>(table.element, [&](auto type) {
            for (int64_t place = 0; place < places_ + kPanel; ++place) {
                const int64_t column = column_of(place), nearest = nearest_of(column);
                const bool is_zero = column != nearest && !repeats_ends();
                row_[place] = is_zero ? Real(0)
                                      : to_real(*reinterpret_cast<const decltype(type)*>(
                                            source + nearest * table.column));
            }
        });
    }

    void fill_along_rank() {
        std::memset(along_rank_, 0, places_ / kPair * columns() * sizeof(Operand));
        for (int64_t begin = 0; begin < places_; begin += kLane) {
            const RightMatrix<Operand> source = of_places(begin);
            for (int64_t r = 0; r < rank_; ++r)
                for (int64_t x = 0; x < kLane; ++x)
                    set(along_rank_[(begin + x) / kPair * columns() + r], (begin + x) % kPair,
                        Arithmetic::element(source.data[r / kPair * source.stride + x],
                                            int(r % kPair)));
        }
    }

    static void set(Operand& operand, int64_t half, Real x) {
        if constexpr (kPair == 1) {
            operand = x;
        } else {
            operand |= Operand(to_bfloat16(x).bits) << (16 * half);
        }
    }

    const Problem& problem_;
    const int tensor_;
    const bool is_reversed_, with_gradient_;
    const int64_t rank_, count_, places_;
    Operand *panels_, *along_rank_;
    Real *ends_, *gradient_, *row_;
    const char* table_ = nullptr;  // that of the vectors
};

}  // namespace bfa::BFA_ISA
