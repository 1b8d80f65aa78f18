// Maps the runtime form of a problem to the compile-time type of its kernel.
#pragma once

#include "arithmetic.h"
#include "forms/cumulative.h"
#include "forms/dense.h"
#include "forms/distance.h"
#include "forms/linear.h"
#include "forms/none.h"
#include "forms/normalized.h"
#include "forms/relative.h"

namespace bfa::BFA_KERNELS {

template <class T>
struct Type {
    using type = T;
};

// Calls function(Type<Bias>) with the class that evaluates the form of a problem in a tile.
template <class Arithmetic, class Function>
void select_bias(const Problem& problem, Function function) {
    using Real = typename Arithmetic::Real;
    switch (problem.form) {
        case Form::none: return function(Type<NoBias<Real>>());
        case Form::linear: return function(Type<LinearBias<Real>>());
        case Form::distance: return function(Type<DistanceBias<Real>>());
        case Form::cumulative: return function(Type<CumulativeBias<Real, false>>());
        case Form::log1p_square: return function(Type<CumulativeBias<Real, true>>());
        case Form::dense: return function(Type<DenseBias<Real>>());
        case Form::normalized: return function(Type<NormalizedBias<Real>>());
        case Form::relative:
        case Form::relative_last:
            // The element type of its tensors, not of q, selects the arithmetic of its products.
            if constexpr (Arithmetic::pair == 2)
                if (problem.form_tensors[0].element == Element::bfloat16)
                    return function(Type<RelativeBias<Arithmetic>>());
            return function(Type<RelativeBias<Plain<Real>>>());
    }
}

}  // namespace bfa::BFA_KERNELS
