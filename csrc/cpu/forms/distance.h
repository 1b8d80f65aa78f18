// The distance form: bias_ij = table[d - first_distance].
#pragma once

#include "base.h"
#include "distance_table.h"

namespace bfa::BFA_KERNELS {

struct Distance : FormDefaults<Distance> {
    enum Tensor { kTable };
    static constexpr FormTraits traits = {
        "distance", {{"table values", rows::per_distance, Refused::nan_and_infinity, true}}};

    template <class Real>
    class Tile;
    template <class Real>
    class Page;
};

template <class Real>
class Distance::Tile : public TileDefaults {
public:
    struct Row {
        typename DistanceTable<Real>::Row table;

        BFA_INLINE Vector<Real> added_to(Vector<Real> s, int column) const {
            return s + load(table.values + column);
        }
    };

    Tile(Arena& arena, const Problem& problem, bool with_gradient)
        : table_(arena, problem, problem.form_tensors[kTable], with_gradient) {}

    void begin_head(int64_t b, int64_t h) {
        table_.begin_head(b, h, [](Real value) { return in_base_2<Real>(value); });
    }
    void begin_tile(Range keys) { table_.begin_tile(keys); }

    template <class Function>
    BFA_INLINE void with_row(int64_t query, Function function) const {
        function(Row{table_.row(query)});
    }

    BFA_INLINE void add_gradient(Row& row, int column, Vector<Real> gradient) {
        Real* target = row.table.gradient + column;
        store(target, load(target) + gradient);
    }
    void end_head(const FormTensor* gradients, int64_t b, int64_t h) {
        table_.end_head(gradients[kTable], b, h);
    }

private:
    DistanceTable<Real> table_;
};

template <class Real>
class Distance::Page final : public PageBias<Real> {
    using PageBias<Real>::p_, PageBias<Real>::block_;

public:
    Page(Arena&, const Decode& problem, int) : PageBias<Real>(problem) {}

    void fill(int row, Range keys, const PageSlot&, Range visible, Real* out) const override {
        const Real* table =
            p_.form_tensors[kTable].template at<Real>(block_->b, block_->head(row)) +
            (block_->position(row) - keys.begin);
        for (int64_t c = visible.begin; c < visible.end; ++c) out[c] = in_base_2<Real>(table[-c]);
    }

    double highest(int row, Range keys, const PageSlot&) const override {
        return this->largest_in_blocks(
            p_.table_highest.template at<Real>(block_->b, block_->head(row)),
            this->distances(row, keys), 1);
    }
};

}  // namespace bfa::BFA_KERNELS
