// What a kernel is told: raw pointers, strides and sizes. No torch, no Python.
#pragma once

#include <cstdint>

#include "bfa_limits.h"
#include "forms.h"

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
    int64_t batch = 0, head = 0, row = 0;

    template <class T = char>
    T* at(int64_t b, int64_t h, int64_t n = 0) const {
        return reinterpret_cast<T*>(data + b * batch + h * head + n * row);
    }
};

// With channels only where a form has numbers of pairs, which may be any distance apart.
struct FormTensor : View {
    int64_t rows = 0;    // of a head
    int64_t column = 0;  // bytes from channel to channel
    Element element = Element::float32;
};

// Where the tokens of a sequence lie among the rows of its batch entry. A query at row i, counted
// from the first one, stands at position i + n_key - n_query + shift, counted from the first key:
// the last one stands `shift` keys beyond the last key, 0 or more.
struct Sequence {
    int64_t first_query, n_query, first_key, n_key, shift;
};

struct Problem {
    Element element;
    Form form;
    int64_t batch, heads, kv_heads, n_query, n_key = 0, head_dim, value_dim;
    double scale;
    bool causal = true;
    int64_t shift = 0;  // how many keys beyond the last one the last query stands
    int64_t window;     // visible past keys per query, its own included; n_key + shift for all
    int threads;
    // One per batch entry, where its rows are not all of its sequence. All lie in one entry whose
    // strides are 0, or each in its own; n_query, n_key and shift are then the largest of any.
    const Sequence* sequences = nullptr;

    View q, k, v;                               // element type
    FormTensor form_tensors[kMostFormTensors];  // those of forms.h; data is null for none
    // In backward passes, real or float64 like these and zero on entry; data is null if not wanted.
    FormTensor grad_form[kMostFormTensors];
    // The plan, one int32 per limits::PLAN_QUERIES queries: of the keys they see, those from the
    // first to before the end are taken. Neither decreases along the queries; data is null for all.
    View first_key, end_key;

    int64_t group() const { return heads / kv_heads; }
    bool has_form_gradient() const { return grad_form[0].data; }
    int64_t position(int64_t query) const { return query + n_key - n_query + shift; }
};

struct Forward : Problem {
    View o;    // element type
    View lse;  // real, natural logarithm
};

// What shortens a plan's ranges; v is not read.
struct Trim : Problem {
    View near;        // real, at most the lse of each query over the keys it always takes
    View cut;         // int32 like first_key, or like end_key where from_end; a copy of it on entry
    double fraction;  // of exp(near), which the keys that go may sum to
    int64_t reach;    // the nearest past keys, which are always taken
    bool from_end;    // keys go from the end of the ranges, else from their begin
};

struct Backward : Problem {
    View o, lse;            // what forward returned
    View grad_o, grad_lse;  // element type, real
    View grad_q, grad_k, grad_v;
};

}  // namespace bfa
