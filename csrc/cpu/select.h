// From a problem's runtime element type and form to the compile-time types of its kernel.
#pragma once

#include "arithmetic.h"
#include "bias.h"

namespace bfa::BFA_ISA {

template <class T>
struct Type {
    using type = T;
};

template <class Arithmetic, class Function>
void select_bias(Form form, Function function) {
    using Real = typename Arithmetic::Real;
    constexpr Type<Arithmetic> arithmetic;
    switch (form) {
        case Form::none: return function(arithmetic, Type<NoBias<Real>>());
        case Form::linear: return function(arithmetic, Type<LinearBias<Real>>());
        case Form::distance: return function(arithmetic, Type<DistanceBias<Real>>());
        case Form::cumulative: return function(arithmetic, Type<CumulativeBias<Real, false>>());
        case Form::log1p_square: return function(arithmetic, Type<CumulativeBias<Real, true>>());
    }
}

// Calls function(Type<Arithmetic>, Type<Bias>).
template <class Function>
void select_kernel(const Problem& problem, Function function) {
    if (problem.element == Element::float64)
        return select_bias<Plain<double>>(problem.form, function);
#if defined(__AVX512BF16__)
    if (problem.element == Element::bfloat16) return select_bias<Paired>(problem.form, function);
#endif
    return select_bias<Plain<float>>(problem.form, function);
}

}  // namespace bfa::BFA_ISA
