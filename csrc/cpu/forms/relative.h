// The relative forms: bias_ij = U_i . P[d] + W_j . Q[d], d = p_i - j. Beyond the tables P and Q the
// terms are zero, or those of the nearest column.
#pragma once

#include "relative/page.h"
#include "relative/tile.h"

namespace bfa::BFA_KERNELS {

template <bool kRepeatsEnds>
struct RelativeForm : RelativeTensors {
    static constexpr FormTraits traits = {kRepeatsEnds ? kLastBeyond : kZeroBeyond,
                                          {{"query factors", rows::per_query},
                                           {"query tables", rows::all},
                                           {"key factors", rows::per_key},
                                           {"key tables", rows::all}}};

    // The element type of the factors, not of q, selects the arithmetic of their products.
    template <class Arithmetic, class Function>
    static void select_tile(const Problem& problem, Function function) {
        if constexpr (Arithmetic::pair == 2)
            if (problem.form_tensors[kQueryFactors].element == Element::bfloat16)
                return function(Type<RelativeTile<Arithmetic>>());
        function(Type<RelativeTile<Plain<typename Arithmetic::Real>>>());
    }

    template <class Real>
    using Page = RelativePage<Real>;
};

using Relative = RelativeForm<false>;
using RelativeLast = RelativeForm<true>;

}  // namespace bfa::BFA_KERNELS
