// Maps the runtime element type and form of a problem to the compile-time types of its kernel.
#pragma once

#include <type_traits>

#include "arithmetic.h"
#include "bias.h"
#include "dense_bias.h"
#include "normalized_bias.h"

namespace bfa::BFA_ISA {

template <class T>
struct Type {
    using type = T;
};

// The class that evaluates a form in a tile.
template <class Real, Form kForm>
struct BiasOf;
template <class Real>
struct BiasOf<Real, Form::none> : Type<NoBias<Real>> {};
template <class Real>
struct BiasOf<Real, Form::linear> : Type<LinearBias<Real>> {};
template <class Real>
struct BiasOf<Real, Form::distance> : Type<DistanceBias<Real>> {};
template <class Real>
struct BiasOf<Real, Form::cumulative> : Type<CumulativeBias<Real, false>> {};
template <class Real>
struct BiasOf<Real, Form::log1p_square> : Type<CumulativeBias<Real, true>> {};
template <class Real>
struct BiasOf<Real, Form::dense> : Type<DenseBias<Real>> {};
template <class Real>
struct BiasOf<Real, Form::normalized> : Type<NormalizedBias<Real>> {};

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

// Calls function(Type<Arithmetic>, Type<Bias>).
template <class Function>
void select_kernel(const Problem& problem, Function function) {
    select_arithmetic(problem.element, [&](auto arithmetic) {
        using Real = typename decltype(arithmetic)::type::Real;
        select_form(problem.form, [&](auto form) {
            function(arithmetic, Type<typename BiasOf<Real, decltype(form)::value>::type>());
        });
    });
}

}  // namespace bfa::BFA_ISA
