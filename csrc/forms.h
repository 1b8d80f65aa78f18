// The forms a bias is lowered to (DESIGN.md, "Forms"): their names, their tensors, and the rows of
// these that belong to one sequence. cpu/forms/ and cpu/page_bias.h evaluate a form in a tile.
//
// Everything here is static or constexpr, because translation units compiled for different
// instruction sets must not share one copy of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace bfa {

enum class Form {
    none,
    linear,
    distance,
    cumulative,
    log1p_square,
    dense,
    normalized,
    relative,
    relative_last
};

constexpr int kMaxFormTensors = 5;

struct FormTraits {
    const char* name;
    // The names, in error messages, of the tensors that are checked for NaN; null for the others.
    const char* tensors[kMaxFormTensors];
    // Whether several sequences of one batch entry read the same values.
    bool is_shared;
    // Whether +infinity in these tensors is an error too.
    bool refuses_infinity = false;
};

constexpr FormTraits kForms[] = {
    {"none", {}, false},
    {"linear", {"slopes"}, false},
    {"distance", {"table values"}, true, true},
    {"cumulative", {"steps", "gains"}, false},
    {"log1p_square", {"steps", "gains"}, false},
    {"dense", {}, false},
    {"normalized", {"table values", "gains", "knots", "slopes", "intercepts"}, true},
    {"relative", {}, false},
    {"relative_last", {}, false},
};

constexpr const FormTraits& traits_of(Form form) { return kForms[int(form)]; }

// Rows [first, first + count) of a tensor, starting at column first_column.
struct FormRows {
    int64_t first, count, first_column = 0;
};

// Returns the rows of a distance table for the distances that occur in one sequence.
template <class Problem, class Sequence>
static FormRows distance_rows(const Problem& whole, const Sequence& rows) {
    const int64_t first = whole.causal ? 0 : 1 - rows.n_query, end = rows.n_key + rows.shift;
    return {whole.causal ? 0 : whole.n_query - rows.n_query,
            std::max<int64_t>(0, std::min(end, whole.window) - first)};
}

// Returns the rows of a form's tensor that belong to one sequence.
template <class Problem, class Sequence>
static FormRows form_rows(const Problem& whole, const Sequence& rows, int tensor) {
    const int64_t positions = rows.n_key + rows.shift;
    switch (whole.form) {
        case Form::none: break;
        case Form::linear: return {0, 1};
        case Form::distance: return distance_rows(whole, rows);
        case Form::cumulative:
        case Form::log1p_square:
            return tensor == 0 ? FormRows{rows.first_key, positions}
                               : FormRows{rows.first_query, rows.n_query};
        case Form::dense: return {rows.first_query, rows.n_query, rows.first_key};
        case Form::normalized:
            if (tensor == 0) return distance_rows(whole, rows);
            if (tensor == 1) return {rows.first_query, rows.n_query};
            return {0, whole.form_tensors[tensor].rows};  // the segments of the function
        case Form::relative:
        case Form::relative_last:
            if (tensor == 0) return {rows.first_query, rows.n_query};
            if (tensor == 2) return {rows.first_key, rows.n_key};
            return {0, whole.form_tensors[tensor].rows};  // the ranks
    }
    return {0, 0};
}

}  // namespace bfa
