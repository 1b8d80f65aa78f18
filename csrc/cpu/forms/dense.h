// The dense form: bias_ij = tensor[i, j].
#pragma once

#include "../element.h"
#include "base.h"

namespace bfa::BFA_KERNELS {

struct Dense : FormDefaults<Dense> {
    enum Tensor { kBias };
    static constexpr FormTraits traits = {"dense", {{"values", rows::per_pair}}};

    template <class Real>
    class Tile;
    template <class Real>
    class Page;
};

// Each element of the gradient belongs to exactly one tile, so it is written to the output of the
// problem directly.
template <class Real>
class Dense::Tile : public TileDefaults {
public:
    struct Row {
        const Real* values;
        Real* gradient;
        char* target;  // if not null, end_row writes the gradient to it

        BFA_INLINE Vector<Real> added_to(Vector<Real> s, int column) const {
            return s + in_base_2<Real>(load(values + column));
        }
    };

    Tile(Arena& arena, const Problem& problem, bool)
        : problem_(problem), values_(arena.take<Real>(kTile)), gradient_(arena.take<Real>(kTile)) {}

    void begin_head(int64_t b, int64_t h) { b_ = b, h_ = h; }
    void begin_tile(Range keys) { keys_ = keys; }

    template <class Function>
    BFA_INLINE void with_row(int64_t query, Function function) const {
        const FormTensor &tensor = problem_.form_tensors[kBias], &sum = problem_.grad_form[kBias];
        const char* source = tensor.at<char>(b_, h_, query) + keys_.begin * tensor.column_stride;
        const int n = int(keys_.end - keys_.begin);
        const bool is_whole = n == kTile;
        const bool in_place = is_whole && tensor.element == kElementOfReal &&
                              tensor.column_stride == int64_t(sizeof(Real));
        Row row = {in_place ? reinterpret_cast<const Real*>(source) : copied(source, n), nullptr,
                   nullptr};
        if (sum.data) {
            char* target = sum.at<char>(b_, h_, query) + keys_.begin * sum.column_stride;
            if (is_whole && sum.element == kElementOfReal) {
                row.gradient = reinterpret_cast<Real*>(target);
            } else {
                std::memset(gradient_, 0, kTile * sizeof(Real));
                row.gradient = gradient_, row.target = target;
            }
        }
        function(row);
    }

    BFA_INLINE void add_gradient(Row& row, int column, Vector<Real> gradient) {
        store(row.gradient + column, load(row.gradient + column) + gradient);
    }
    void end_row(const Row& row, int) {
        if (!row.target) return;
        const int64_t n = keys_.end - keys_.begin;
        write_row(problem_.grad_form[kBias].element, row.gradient, Real(1), n, row.target);
    }
    void end_head(const FormTensor*, int64_t, int64_t) {}

private:
    static constexpr Element kElementOfReal =
        sizeof(Real) == 8 ? Element::float64 : Element::float32;

    // Returns a contiguous copy in Real, padded with zeros beyond the last key.
    BFA_INLINE const Real* copied(const char* source, int n) const {
        const FormTensor& tensor = problem_.form_tensors[kBias];
        with_element<Real>(tensor.element, [&](auto type) {
            using Number = decltype(type);
            const bool is_dense = tensor.column_stride == int64_t(sizeof(Number));
            if (is_dense && n == kTile) {  // a constant trip count, which the compiler vectorizes
                const auto* x = reinterpret_cast<const Number*>(source);
                for (int c = 0; c < kTile; ++c) values_[c] = to_real(x[c]);
            } else {
                for (int c = 0; c < n; ++c)
                    values_[c] = to_real(
                        *reinterpret_cast<const Number*>(source + c * tensor.column_stride));
            }
        });
        for (int c = n; c < kTile; ++c) values_[c] = 0;
        return values_;
    }

    const Problem& problem_;
    Real *values_, *gradient_;
    int64_t b_ = 0, h_ = 0;
    Range keys_ = {0, 0};
};

template <class Real>
class Dense::Page final : public PageBias<Real> {
    using PageBias<Real>::p_, PageBias<Real>::block_;

public:
    Page(Arena&, const Decode& problem, int) : PageBias<Real>(problem) {}

    void fill(int row, Range keys, const PageSlot&, Range visible, Real* out) const override {
        const FormTensor& tensor = p_.form_tensors[kBias];
        const char* values = tensor.at<char>(block_->b, block_->head(row), block_->query(row)) +
                             keys.begin * tensor.column_stride;
        for (int64_t c = visible.begin; c < visible.end; ++c)
            read_row(tensor.element, values + c * tensor.column_stride, 1, out + c);
        for (int64_t c = visible.begin; c < visible.end; ++c) out[c] = in_base_2<Real>(out[c]);
    }
};

}  // namespace bfa::BFA_KERNELS
