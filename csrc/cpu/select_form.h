// Maps the runtime form of a problem to its compile-time type.
#pragma once

#include "forms/list.h"

namespace bfa::BFA_KERNELS {

template <class Function, class... Form>
void with_form(const Problem& problem, Function function, FormList<Form...>) {
    int index = 0;
    ((problem.form->index == index++ ? function(Type<Form>()) : void()), ...);
}

// Calls function(Type<Bias>()) with the class that evaluates the form of a problem in a tile.
template <class Arithmetic, class Function>
void select_tile_bias(const Problem& problem, Function function) {
    with_form(
        problem,
        [&](auto form) {
            decltype(form)::type::template select_tile<Arithmetic>(problem, function);
        },
        Forms());
}

// Returns the object that evaluates the form of a problem in a page.
template <class Real>
PageBias<Real>* make_page_bias(Arena& arena, const Decode& problem, int rows) {
    PageBias<Real>* bias = nullptr;
    with_form(
        problem,
        [&](auto form) {
            bias = arena.make<typename decltype(form)::type::template Page<Real>>(problem, rows);
        },
        Forms());
    return bias;
}

}  // namespace bfa::BFA_KERNELS
