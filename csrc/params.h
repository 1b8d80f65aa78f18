// What a kernel is told: raw pointers, strides and sizes. No torch, no Python.
#pragma once

#include <cstdint>

namespace bfa {

enum class Element { float64, float32, bfloat16, float16 };

constexpr int64_t element_bytes(Element element) {
    return element == Element::float64 ? 8 : element == Element::float32 ? 4 : 2;
}

// What the bias of query i and key j depends on; see DESIGN.md, "Forms".
enum class Form { none, linear, distance, cumulative, log1p_square };

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

// Where the tokens of a sequence lie among the rows of its batch entry. A query at row i, counted
// from the first one, stands at position i + n_key - n_query + shift, counted from the first key:
// the last one stands `shift` keys beyond the last key, 0 or more.
struct Sequence {
    int64_t first_query, n_query, first_key, n_key, shift;
};

// Consecutive queries that a plan treats alike.
constexpr int64_t kPlanQueries = 128;

struct Problem {
    Element element;
    Form form;
    int64_t batch, heads, kv_heads, n_query, n_key, head_dim, value_dim;
    double scale;
    bool causal;
    int64_t shift;    // how many keys beyond the last one the last query stands
    int64_t window;   // visible past keys per query, its own included; n_key + shift for all
    int64_t n_terms;  // length of the last dimension of `terms`
    int threads;
    // One per batch entry, where its rows are not all of its sequence. All lie in one entry whose
    // strides are 0, or each in its own; n_query, n_key and shift are then the largest of any.
    const Sequence* sequences;

    View q, k, v;  // element type
    // real (linear: slopes; distance: table) or float64 (cumulative: sums up to the last query)
    View terms;
    View gain;  // real, one per query; data is null for none
    // The plan, one int32 per kPlanQueries queries: of the keys they see, those from the first to
    // before the end are taken. Neither decreases along the queries; data is null for all keys.
    View first_key, end_key;

    // "real" is float64 for float64 inputs and float32 otherwise.
    int64_t position(int64_t query) const { return query + n_key - n_query + shift; }
};

struct Forward : Problem {
    View o;    // element type
    View lse;  // real, natural logarithm
};

// What shortens a plan's ranges; v is not read.
struct Trim : Problem {
    View near;      // real, at most the lse of each query over the keys it always takes
    View cut;       // int32 like first_key, or like end_key where from_end; a copy of it on entry
    double share;   // of exp(near), which the keys that go may sum to
    int64_t reach;  // the nearest past keys, which are always taken
    bool from_end;  // keys go from the end of the ranges, else from their begin
};

struct Backward : Problem {
    View o, lse;            // what forward returned
    View grad_o, grad_lse;  // element type, real
    View grad_q, grad_k, grad_v;
    View grad_terms;  // like terms, zero on entry; data is null when not wanted
    View grad_gain;   // like gain, zero on entry
};

}  // namespace bfa
