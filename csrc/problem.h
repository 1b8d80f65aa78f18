// Arguments of the kernels: raw pointers, strides and sizes, independent of torch and Python.
#pragma once

#include <cstdint>

#include "forms.h"
#include "shared_constants.h"

namespace bfa {

enum class Element { float64, float32, bfloat16, float16 };

constexpr int64_t element_bytes(Element element) {
    return element == Element::float64 ? 8 : element == Element::float32 ? 4 : 2;
}

// "real" is float64 for float64 inputs and float32 otherwise.
constexpr int64_t real_bytes(Element element) { return element == Element::float64 ? 8 : 4; }

// A (batch, heads, sequence, channels) tensor with contiguous channels, or a (batch, heads,
// sequence) tensor with a contiguous sequence. Strides count bytes; 0 broadcasts.
struct View {
    char* data = nullptr;
    int64_t batch_stride = 0, head_stride = 0, row_stride = 0;

    template <class T = char>
    T* at(int64_t b, int64_t h, int64_t n = 0) const {
        return reinterpret_cast<T*>(data + b * batch_stride + h * head_stride + n * row_stride);
    }
};

// A tensor of a form. Channels, if it has any, may have any stride.
struct FormTensor : View {
    int64_t rows = 0;  // rows per head
    int64_t column_stride = 0;
    Element element = Element::float32;
    int64_t columns = 1;  // channels
};

// The rows of a batch entry that belong to one sequence. Its query i has position
// i + n_key - n_query + shift, counted from its first key: the last query is `shift` >= 0 positions
// beyond the last key.
struct Sequence {
    int64_t first_query, n_query, first_key, n_key, shift;
};

struct Problem {
    Element element;
    const FormTraits* form;
    int64_t batch, heads, kv_heads, n_query, n_key = 0, head_dim, value_dim;
    double scale;
    bool causal = true;
    int64_t shift = 0;  // position of the last query minus that of the last key
    int64_t window;     // visible keys per query, including its own; n_key + shift without a window
    int threads;
    // One record per sequence, or null if every batch entry is one whole sequence. Packed sequences
    // share one batch entry, whose batch stride is 0; padded ones have a batch entry each. n_query,
    // n_key and shift are then the maxima over the sequences.
    const Sequence* sequences = nullptr;

    View q, k, v;  // element type
    FormTensor
        form_tensors[kMaxFormTensors];  // in the order of the form's traits; data is null if absent
    // Backward only: the gradients of form_tensors, real or of the same element types, zero on
    // entry. data is null if they are not requested.
    FormTensor grad_form[kMaxFormTensors];
    // The plan, one int32 per constants::PLAN_QUERIES queries: of the visible keys, only those in
    // [first_key, end_key) are attended to. Neither decreases along the queries. data is null
    // without a plan.
    View first_key, end_key;

    int64_t group() const { return heads / kv_heads; }
    bool has_form_gradient() const {
        for (const FormTensor& x : grad_form)  // an empty tensor has no address
            if (x.data) return true;
        return false;
    }
    int64_t position(int64_t query) const { return query + n_key - n_query + shift; }
};

struct Forward : Problem {
    View o;               // element type
    View lse;             // real, natural logarithm
    View pivot, log_sum;  // real: lse in base 2 is their sum
};

// Shortens the key ranges of a plan. v is not read.
struct Trim : Problem {
    View near;  // real: a lower bound on each query's lse over the keys that are never removed
    View cut;   // int32, laid out like end_key if from_end, else like first_key; its copy on entry
    double fraction;  // upper bound on sum exp(s_ij - near_i) over the removed keys
    int64_t reach;    // the number of nearest past keys, which are never removed
    bool from_end;    // removes keys from the end of the ranges, else from their beginning
};

struct Backward : Problem {
    View o, pivot, log_sum;  // the results of forward
    View grad_o, grad_lse;   // element type; real
    View grad_q, grad_k, grad_v;
};

}  // namespace bfa
