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

// Calls function(Type<Arithmetic>).
template <class Function>
void select_arithmetic(Element element, Function function) {
    if (element == Element::float64) return function(Type<Plain<double>>());
#if defined(__AVX512BF16__)
    if (element == Element::bfloat16) return function(Type<Paired>());
#endif
    return function(Type<Plain<float>>());
}

// Calls function(Type<Arithmetic>, Type<Bias>).
template <class Function>
void select_kernel(const Problem& problem, Function function) {
    select_arithmetic(problem.element, [&](auto arithmetic) {
        select_bias<typename decltype(arithmetic)::type>(problem.form, function);
    });
}

}  // namespace bfa::BFA_ISA
