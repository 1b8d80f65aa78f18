// What both terms of the relative form have in common: U P, whose rows are queries, and W Q, whose
// rows are keys.
//
// For a strip of queries and a tile of keys, the products of the rows with the vectors of their
// distances are one small matrix product, whose rows are shifted against each other. Where all
// distances are beyond the same end of the table, the term is zero or the product with the last
// vector: one number per row.
#pragma once

#include "end_products.h"
#include "sheared_products.h"
#include "tensors.h"

namespace bfa::BFA_KERNELS {

// The row of a term is that of one query and the keys of a tile. It adds the products to natural
// logits, and gets their gradients. Here the term is absent.
template <class Real>
struct AbsentRow {
    BFA_INLINE Vector<Real> added_to(Vector<Real> s, int) const { return s; }
    BFA_INLINE void add_gradient(int, Vector<Real>) {}
    BFA_INLINE void end() {}
};

// One product for each key. kAccumulates: whether gradients are added to those in memory.
template <class Real, bool kAccumulates>
struct ProductsRow {
    const Real* products;
    Real* gradients;

    BFA_INLINE Vector<Real> added_to(Vector<Real> s, int column) const {
        return s + load(products + column);
    }
    BFA_INLINE void add_gradient(int column, Vector<Real> gradient) {
        Real* target = gradients + column;
        store(target, kAccumulates ? load(target) + gradient : gradient);
    }
    BFA_INLINE void end() {}
};

// All keys are beyond the same end of the table and have the same product.
template <class Real>
struct EndRow {
    Real product;
    double* sum;
    Vector<Real> gradient = {};

    BFA_INLINE Vector<Real> added_to(Vector<Real> s, int) const { return s + broadcast(product); }
    BFA_INLINE void add_gradient(int, Vector<Real> x) { gradient += x; }
    BFA_INLINE void end() { *sum += reduce_sum<Real>(gradient); }
};

// kRows: the rows of a product; kWidth: the keys, or queries, that each is multiplied for.
template <class Arithmetic, int kRows, int kWidth>
class RelativeTerm : public RelativeTensors {
protected:
    using Real = typename Arithmetic::Real;
    using Products = ShearedProducts<Arithmetic, kRows, kWidth>;

    // end_rows: the number of rows for which products beyond the table are kept.
    RelativeTerm(Arena& arena, const Problem& problem, Tensor factors, Tensor table,
                 bool is_reversed, int64_t end_rows, bool with_gradient)
        : problem_(problem),
          factors_(factors),
          table_(table),
          with_gradient_(with_gradient),
          repeats_ends_(repeats_ends(problem)),
          vectors_(arena, problem, table, is_reversed, with_gradient),
          rows_(arena, exists() ? kRows : 0, vectors_.rank(), with_gradient),
          ends_(arena, exists() ? end_rows : 0, vectors_.rank(), with_gradient),
          products_(arena, exists(), with_gradient) {}

public:
    bool exists() const { return vectors_.exists(); }

protected:
    // Packs the factors of `count` rows, and zeros after them.
    void pack(int64_t first, int64_t count) {
        const FormTensor& factors = problem_.form_tensors[factors_];
        rows_.pack(factors.element, factors.template at<char>(b_, h_, first), factors.row_stride,
                   count, kRows);
    }

    // Locates a strip, whose span begins with `distance`, in the table.
    void begin_strip(int64_t distance) {
        const int64_t place = vectors_.place_of(distance);
        end_ = vectors_.end_of(place);
        is_present_ = !is_beyond() || repeats_ends_;
        products_.begin(place);
    }
    // Whether the bias of the strip has this term.
    bool is_present() const { return is_present_; }
    bool is_beyond() const { return end_ >= 0; }

    void compute_products() {
        products_.compute(rows_.left(0), vectors_);
        if (with_gradient_) products_.clear_margins();
    }

    // Adds those of the strip to the gradients of the factors and of the vectors. visible(row)
    // returns the entries of a row of the products that have a visible pair.
    template <class VisibleEntries>
    void add_gradients(const Result<Real>& factors, VisibleEntries visible) {
        if (rows_.all_finite(kRows) && vectors_.all_finite())
            products_.add_gradients(rows_.right(0), factors, vectors_);
        else
            products_.add_visible_gradients(rows_.right(0), factors, vectors_, visible);
    }

    // Adds the gradients of `count` rows of factors to the output.
    void add_factor_gradients(int64_t first, int64_t count, const Result<Real>& gradients) const {
        const FormTensor& output = problem_.grad_form[factors_];
        for (int64_t row = 0; row < count; ++row)
            add_row(output.element, gradients.data + row * gradients.stride, vectors_.rank(),
                    output.template at<char>(b_, h_, first + row));
    }
    void add_table_gradient() const { vectors_.end_head(problem_.grad_form[table_], b_, h_); }

    const Problem& problem_;
    const Tensor factors_, table_;
    const bool with_gradient_, repeats_ends_;
    DistanceVectors<Arithmetic> vectors_;
    PackedRows<Arithmetic> rows_;
    EndProducts<Arithmetic> ends_;
    Products products_;

    int64_t b_ = 0, h_ = 0;
    int end_ = -1;  // the end of the table that the strip is beyond, or -1
    bool is_present_ = false;
};

}  // namespace bfa::BFA_KERNELS
