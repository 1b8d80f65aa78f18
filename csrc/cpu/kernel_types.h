// Maps the runtime element type and form of a problem to the compile-time types of its kernel.
#pragma once

#include <type_traits>

#include "arithmetic.h"
#include "forms/cumulative.h"
#include "forms/dense.h"
#include "forms/distance.h"
#include "forms/linear.h"
#include "forms/none.h"
#include "forms/normalized.h"
#include "forms/relative.h"

namespace bfa::BFA_ISA {

template <class T>
struct Type {
    using type = T;
};

// Calls function(std::integral_constant<Form, form>).
template <class Function>
void select_form(Form form, Function function) {
    switch (form) {
#define BFA_SELECT(form) \
    case Form::form: return function(std::integral_constant<Form, Form::form>())
        BFA_SELECT(none);
        BFA_SELECT(linear);
        BFA_SELECT(distance);
        BFA_SELECT(cumulative);
        BFA_SELECT(log1p_square);
        BFA_SELECT(dense);
        BFA_SELECT(normalized);
        BFA_SELECT(relative);
        BFA_SELECT(relative_last);
#undef BFA_SELECT
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

// Calls function(Type<Arithmetic>, Type<Bias>).
template <class Function>
void select_kernel(const Problem& problem, Function function) {
    select_arithmetic(problem.element, [&](auto arithmetic) {
        select_bias<typename decltype(arithmetic)::type>(
            problem, [&](auto bias) { function(arithmetic, bias); });
    });
}

}  // namespace bfa::BFA_ISA
