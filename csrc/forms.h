// What the code between Python and the kernels knows of a form (DESIGN.md, "Forms"). The forms are
// listed in cpu/forms/list.h.
#pragma once

#include <cstdint>

namespace bfa {

struct FormTensor;
struct Problem;
struct Sequence;

constexpr int kMaxFormTensors = 5;

// Rows [first, first + count) of a tensor, starting at column first_column.
struct RowRange {
    int64_t first, count, first_column = 0;
};

enum class Refused { nothing, nan, nan_and_infinity };

struct TensorTraits {
    const char* name;  // in error messages
    // Returns the rows that belong to one sequence.
    RowRange (*sequence_rows)(const Problem& whole, const Sequence& sequence,
                              const FormTensor& tensor);
    Refused refused = Refused::nothing;  // values that are errors; infinity is the positive one
    // Whether the sequences of one batch entry read the same values, and add to one gradient.
    bool is_shared = false;
};

struct FormTraits {
    const char* name;
    TensorTraits tensors[kMaxFormTensors];  // without a name beyond the last one
    int index = 0;                          // in the list of forms, which assigns it
};

// Throws std::invalid_argument, with the names of all forms, if there is no form of this name.
const FormTraits& find_form(const char* name);

}  // namespace bfa
