#pragma once

#include "base.h"

namespace bfa::BFA_KERNELS {

template <class Real>
class NoBias : public BiasDefaults {
public:
    struct Row {
        BFA_INLINE Vector<Real> added_to(Vector<Real> s, int) const { return s; }
    };

    NoBias(Arena&, const Problem&, bool) {}
    void begin_head(int64_t, int64_t) {}
    void begin_tile(Range) {}
    template <class Function>
    BFA_INLINE void with_row(int64_t, Function function) const {
        function(Row{});
    }

    static constexpr bool has_gradient = false;
};

}  // namespace bfa::BFA_KERNELS
