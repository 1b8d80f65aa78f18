// The forms a bias is lowered to (DESIGN.md, "Forms"): names, tensors, and where a sequence has its
// numbers in them. What a form adds to a tile is in cpu/bias.h and cpu/page_bias.h.
//
// Everything here is static or constexpr: files for different instruction sets must not share one
// copy of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace bfa {

enum class Form { none, linear, distance, cumulative, log1p_square, dense };

constexpr int kMostFormTensors = 4;

struct FormFacts {
    const char* name;
    // What error messages call the tensors in which NaN is looked for; null for others.
    const char* tensors[kMostFormTensors];
    // Whether sequences of one batch entry have numbers in common.
    bool is_shared;
};

constexpr FormFacts kForms[] = {
    {"none", {}, false},
    {"linear", {"slopes"}, false},
    {"distance", {"table values"}, true},
    {"cumulative", {"steps", "gains"}, false},
    {"log1p_square", {"steps", "gains"}, false},
    {"dense", {}, false},
};

constexpr const FormFacts& facts_of(Form form) { return kForms[int(form)]; }

// Rows [first, first + count) of a tensor, from a column on.
struct FormRows {
    int64_t first, count, first_column = 0;
};

// Which rows of a form's tensor are those of one sequence.
template <class Problem, class Sequence>
static FormRows form_rows(const Problem& whole, const Sequence& rows, int tensor) {
    const int64_t places = rows.n_key + rows.shift;
    switch (whole.form) {
        case Form::none: break;
        case Form::linear: return {0, 1};
        case Form::distance: {
            // Of distances, those that the sequence has.
            const int64_t first = whole.causal ? 0 : 1 - rows.n_query;
            return {whole.causal ? 0 : whole.n_query - rows.n_query,
                    std::max<int64_t>(0, std::min(places, whole.window) - first)};
        }
        case Form::cumulative:
        case Form::log1p_square:
            return tensor == 0 ? FormRows{rows.first_key, places}
                               : FormRows{rows.first_query, rows.n_query};
        case Form::dense: return {rows.first_query, rows.n_query, rows.first_key};
    }
    return {0, 0};
}

}  // namespace bfa
