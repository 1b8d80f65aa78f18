#pragma once

#include "base.h"
#include "distance_table.h"

namespace bfa::BFA_KERNELS {

// table[d - first_distance].
template <class Real>
class DistanceBias : public BiasDefaults {
public:
    struct Row {
        typename DistanceTable<Real>::Row table;

        BFA_INLINE Vector<Real> added_to(Vector<Real> s, int column) const {
            return s + load(table.values + column);
        }
    };

    DistanceBias(Arena& arena, const Problem& problem, bool with_gradient)
        : table_(arena, problem, with_gradient) {}

    void begin_head(int64_t b, int64_t h) { table_.begin_head(b, h, Real(kLog2e)); }
    void begin_tile(Range keys) { table_.begin_tile(keys); }

    template <class Function>
    BFA_INLINE void with_row(int64_t query, Function function) const {
        function(Row{table_.row(query)});
    }

    static constexpr bool has_gradient = true;

    BFA_INLINE void add_gradient(Row& row, int column, Vector<Real> gradient) {
        Real* target = row.table.gradient + column;
        store(target, load(target) + gradient);
    }
    void end_head(const FormTensor* gradients, int64_t b, int64_t h) {
        table_.end_head(gradients[0], b, h);
    }

private:
    DistanceTable<Real> table_;
};

}  // namespace bfa::BFA_KERNELS
