// The relative form: bias_ij = U_i . P[d] + W_j . Q[d], d = p_i - j.
//
// For a strip of queries and a tile of keys, the products with the vectors of all their distances
// are one small matrix product: E = U P has a row per query, and F = W Q a row per key. Entry (i,
// j) of the bias is on a diagonal of E and F. With P in the order of decreasing distances, the
// entries of a query are adjacent in E.
#pragma once

#include <algorithm>

#include "bias.h"
#include "packed_rows.h"
#include "visibility.h"

namespace bfa::BFA_ISA {

// The distances of a strip and a tile, and one for an even start.
constexpr int kSpan = kStripRows + kTile;

// The vectors of all distances of one head, padded beyond either end by those of the form.
template <class Arithmetic>
class DistanceVectors {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    static constexpr int kPair = Arithmetic::pair;
    static constexpr int64_t kPadding = 2 * kSpan;

public:
    // tensor: the index of the form's (1, H or 1, R, n) tensor. is_reversed: whether places are in
    // the order of decreasing distances.
    DistanceVectors(Arena& arena, const Problem& problem, int tensor, bool is_reversed,
                    bool with_gradient)
        : problem_(problem),
          tensor_(tensor),
          is_reversed_(is_reversed),
          rank_(problem.form_tensors[tensor].rows),
          count_(problem.form_tensors[tensor].columns),
          places_(exists() ? round_up(count_ + 2 * kPadding, kLanes<Real> * kPair) : 0),
          along_distances_(arena.take<Operand>(depth() * places_)),
          along_rank_(arena.take<Operand>(with_gradient ? places_ / kPair * columns() : 0)),
          gradient_(arena.take<Real>(with_gradient ? places_ * columns() : 0)),
          row_(arena.take<Real>(count_)) {}

    bool exists() const { return rank_ > 0; }
    int64_t depth() const { return round_up(rank_, kPair) / kPair; }
    int64_t columns() const { return round_up(rank_, kLanes<Real>); }
    int64_t first_distance() const { return problem_.causal ? 0 : -(count_ / 2); }

    void begin_head(int64_t b, int64_t h, bool with_gradient) {
        const FormTensor& table = problem_.form_tensors[tensor_];
        const bool repeats_ends = problem_.form == Form::relative_last;
        std::memset(along_distances_, 0, depth() * places_ * sizeof(Operand));
        if (with_gradient) {
            std::memset(along_rank_, 0, places_ / kPair * columns() * sizeof(Operand));
            std::memset(gradient_, 0, places_ * columns() * sizeof(Real));
        }
        for (int64_t r = 0; r < rank_; ++r) {
            read(table.at<char>(b, h, r), table);
            for (int64_t place = 0; place < places_; ++place) {
                const int64_t column = column_of(place);
                const int64_t nearest = std::clamp<int64_t>(column, 0, count_ - 1);
                if (column != nearest && !repeats_ends) continue;
                set(along_distances_[r / kPair * places_ + place], r % kPair, row_[nearest]);
                if (with_gradient)
                    set(along_rank_[place / kPair * columns() + r], place % kPair, row_[nearest]);
            }
        }
    }

    // Returns the first place of a span that begins, in the order of places, with `distance`. It is
    // even, and may be the place before.
    int64_t place_of(int64_t distance) const {
        const int64_t column = distance - first_distance();
        const int64_t place = kPadding + (is_reversed_ ? count_ - 1 - column : column);
        return std::clamp<int64_t>(place, 0, places_ - kSpan - 2);
    }

    // Whether all entries of the span from `place` on are zero.
    bool is_zero(int64_t place) const {
        return problem_.form == Form::relative &&
               (place >= kPadding + count_ || place + kSpan <= kPadding);
    }

    // For products that contract the ranks, and those that contract the distances.
    RightMatrix<Operand> of_distances(int64_t place) const {
        return {along_distances_ + place, places_};
    }
    RightMatrix<Operand> of_ranks(int64_t even_place) const {
        return {along_rank_ + even_place / kPair * columns(), columns()};
    }
    Result<Real> gradient(int64_t place) const {
        return {gradient_ + place * columns(), columns()};
    }

    void end_head(const FormTensor& gradient, int64_t b, int64_t h) const {
        for (int64_t r = 0; r < rank_; ++r) {
            Real* out = gradient.at<Real>(b, h, r);
            for (int64_t place = 0; place < places_; ++place) {
                const int64_t column = column_of(place);
                const int64_t nearest = std::clamp<int64_t>(column, 0, count_ - 1);
                if (column == nearest || problem_.form == Form::relative_last)
                    out[nearest] += gradient_[place * columns() + r];
            }
        }
    }

private:
    int64_t column_of(int64_t place) const {
        const int64_t column = place - kPadding;
        return is_reversed_ ? count_ - 1 - column : column;
    }

    void read(const char* source, const FormTensor& table) const {
        with_element<Real>(table.element, [&](auto type) {
            for (int64_t d = 0; d < count_; ++d)
                row_[d] =
                    to_real(*reinterpret_cast<const decltype(type)*>(source + d * table.column));
        });
    }

    static void set(Operand& operand, int64_t half, Real x) {
        if constexpr (kPair == 1) {
            operand = x;
        } else {
            operand |= Operand(to_bfloat16(x).bits) << (16 * half);
        }
    }

    const Problem& problem_;
    const int tensor_;
    const bool is_reversed_;
    const int64_t rank_, count_, places_;
    Operand *along_distances_, *along_rank_;
    Real *gradient_, *row_;
};

// Implements the interface described in bias.h. Arithmetic is that of the products above, which
// have factors in the form's own element type.
template <class Arithmetic>
class RelativeBias : public BiasDefaults {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    static constexpr int kPair = Arithmetic::pair;

public:
    // kOfQuery: whether the tile has products of queries; kOfKey: of keys.
    template <bool kOfQuery, bool kOfKey>
    struct Row {
        const Real *of_query, *of_key;
        Real *query_gradient, *key_gradient;

        BFA_INLINE Vector<Real> added_to(Vector<Real> s, int column) const {
            Vector<Real> bias = {};
            if constexpr (kOfQuery) bias += load(of_query + column);
            if constexpr (kOfKey) bias += load(of_key + column);
            return s + bias * Real(kLog2e);
        }
    };

    RelativeBias(Arena& arena, const Problem& problem, bool with_gradient)
        : problem_(problem),
          with_gradient_(with_gradient),
          query_vectors_(arena, problem, 1, true, with_gradient),
          key_vectors_(arena, problem, 3, false, with_gradient),
          padded_queries_(query_vectors_.exists() ? padded(problem.n_query) : 0),
          queries_(arena, padded_queries_, problem.form_tensors[1].rows),
          keys_(arena, key_vectors_.exists() ? kTile : 0, problem.form_tensors[3].rows),
          of_queries_(arena.take<Real>(query_vectors_.exists() ? kStripRows * kSpan : 0)),
          of_keys_(arena.take<Real>(key_vectors_.exists() ? kTile * kSpan : 0)),
          of_keys_transposed_(arena.take<Real>(key_vectors_.exists() ? kStripRows * kTile : 0)),
          span_gradients_(arena.take<Real>(with_gradient ? kTile * kSpan : 0)),
          strip_gradients_(arena.take<Real>(with_gradient ? kStripRows * kTile : 0)),
          pairs_(arena.take<Operand>(with_gradient && kPair == 2 ? kTile * kSpan : 0)),
          query_gradients_(
              arena.take<Real>(with_gradient ? padded_queries_ * queries_.columns() : 0)),
          key_gradients_(arena.take<Real>(with_gradient ? kTile * keys_.columns() : 0)) {}

    void begin_head(int64_t b, int64_t h) {
        b_ = b, h_ = h;
        if (query_vectors_.exists()) {
            query_vectors_.begin_head(b, h, with_gradient_);
            const FormTensor& factors = problem_.form_tensors[0];
            queries_.pack(factors.element, factors.at<char>(b, h), factors.row, problem_.n_query,
                          padded(problem_.n_query));
            if (with_gradient_)
                std::memset(query_gradients_, 0,
                            padded_queries_ * queries_.columns() * sizeof(Real));
        }
        if (key_vectors_.exists()) key_vectors_.begin_head(b, h, with_gradient_);
    }

    void begin_tile(Range keys) {
        tile_ = keys;
        if (!key_vectors_.exists()) return;
        const FormTensor& factors = problem_.form_tensors[2];
        keys_.pack(factors.element, factors.at<char>(b_, h_, keys.begin), factors.row,
                   keys.end - keys.begin, kTile);
        if (with_gradient_) std::memset(key_gradients_, 0, kTile * keys_.columns() * sizeof(Real));
    }

    void begin_strip(Range strip) {
        strip_ = strip;
        const int64_t position = problem_.position(strip.begin);
        if (query_vectors_.exists()) {
            query_place_ = query_vectors_.place_of(position + kStripRows - 1 - tile_.begin);
            has_query_products_ = !query_vectors_.is_zero(query_place_);
            if (has_query_products_) {
                gemm<Arithmetic, false>(
                    kStripRows, kSpan, queries_.depth(), queries_.left(strip.begin),
                    query_vectors_.of_distances(even(query_place_)), {of_queries_, kSpan});
                if (with_gradient_)
                    std::memset(span_gradients_, 0, kStripRows * kSpan * sizeof(Real));
            }
        }
        if (key_vectors_.exists()) {
            key_place_ = key_vectors_.place_of(position - tile_.begin - (kTile - 1));
            has_key_products_ = !key_vectors_.is_zero(key_place_);
            if (has_key_products_) {
                gemm<Arithmetic, false>(kTile, kSpan, keys_.depth(), keys_.left(0),
                                        key_vectors_.of_distances(even(key_place_)),
                                        {of_keys_, kSpan});
                // The entries of a query are on an antidiagonal: rows of a stride that is one less.
                transpose(of_keys_ + key_offset(), kTile, kStripRows, kSpan - 1,
                          of_keys_transposed_);
                if (with_gradient_)
                    std::memset(strip_gradients_, 0, kStripRows * kTile * sizeof(Real));
            }
        }
    }

    template <class Function>
    BFA_INLINE void with_row(int64_t query, Function function) const {
        const int64_t r = query - strip_.begin, place = r * kSpan + query_offset(r);
        const Real *of_query = of_queries_ + place, *of_key = of_keys_transposed_ + r * kTile;
        Real *query_gradient = span_gradients_ + place,
             *key_gradient = strip_gradients_ + r * kTile;
        if (has_query_products_ && has_key_products_)
            return function(Row<true, true>{of_query, of_key, query_gradient, key_gradient});
        if (has_query_products_)
            return function(Row<true, false>{of_query, nullptr, query_gradient, nullptr});
        if (has_key_products_)
            return function(Row<false, true>{nullptr, of_key, nullptr, key_gradient});
        function(typename NoBias<Real>::Row{});
    }

    static constexpr bool has_gradient = true;

    // Padding rows of a strip repeat its last row, with a gradient of 0.
    template <bool kOfQuery, bool kOfKey>
    BFA_INLINE void add_gradient(Row<kOfQuery, kOfKey>& row, int column, Vector<Real> gradient) {
        if constexpr (kOfQuery) add(row.query_gradient + column, gradient);
        if constexpr (kOfKey) add(row.key_gradient + column, gradient);
    }
    void add_gradient(typename NoBias<Real>::Row&, int, Vector<Real>) {}

    void end_strip(Range strip) {
        if (has_query_products_) add_query_gradients(strip);
        if (has_key_products_) add_key_gradients();
    }

    // Each row of the gradient of W belongs to one tile, so it is added to the output directly.
    void end_block(Range keys) {
        if (!key_vectors_.exists()) return;
        const FormTensor& out = problem_.grad_form[2];
        for (int64_t j = keys.begin; j < keys.end; ++j) {
            Real* sums = key_gradients_ + (j - keys.begin) * keys_.columns();
            Real* row = out.at<Real>(b_, h_, j);
            for (int64_t r = 0; r < problem_.form_tensors[3].rows; ++r) row[r] += sums[r];
        }
        std::memset(key_gradients_, 0, kTile * keys_.columns() * sizeof(Real));
    }

    void end_head(const FormTensor* gradients, int64_t b, int64_t h) {
        if (query_vectors_.exists()) {
            query_vectors_.end_head(gradients[1], b, h);
            for (int64_t i = 0; i < problem_.n_query; ++i) {
                Real* row = gradients[0].at<Real>(b, h, i);
                for (int64_t r = 0; r < problem_.form_tensors[1].rows; ++r)
                    row[r] += query_gradients_[i * queries_.columns() + r];
            }
        }
        if (key_vectors_.exists()) key_vectors_.end_head(gradients[3], b, h);
    }

private:
    static int64_t padded(int64_t n_query) { return round_up(n_query, 2) + kStripRows; }
    static int64_t even(int64_t place) { return place / 2 * 2; }
    int64_t query_offset(int64_t r) const { return kStripRows - 1 - r + query_place_ % 2; }
    int64_t key_offset() const { return kTile - 1 + key_place_ % 2; }

    BFA_INLINE static void add(Real* target, Vector<Real> x) { store(target, load(target) + x); }

    // dU += dE P^T and dP += U^T dE.
    void add_query_gradients(Range strip) {
        const int64_t place = even(query_place_);
        const Result<Real> sums = {query_gradients_ + strip.begin * queries_.columns(),
                                   queries_.columns()};
        add_products(kStripRows, query_vectors_.of_ranks(place), sums, queries_.right(strip.begin),
                     query_vectors_.gradient(place));
    }

    // dW += dF Q^T and dQ += W^T dF.
    void add_key_gradients() {
        std::memset(span_gradients_, 0, kTile * kSpan * sizeof(Real));
        for (int r = 0; r < kStripRows; ++r)
            for (int c = 0; c < kTile; ++c)
                span_gradients_[key_offset() + c * (kSpan - 1) + r] =
                    strip_gradients_[r * kTile + c];
        const int64_t place = even(key_place_);
        add_products(kTile, key_vectors_.of_ranks(place), {key_gradients_, keys_.columns()},
                     keys_.right(0), key_vectors_.gradient(place));
    }

    // Adds the products of span_gradients_, `rows` rows of kSpan columns, with the vectors of the
    // columns, and those of its transpose with the vectors of the rows.
    void add_products(int rows, RightMatrix<Operand> of_columns, Result<Real> row_sums,
                      RightMatrix<Operand> of_rows, Result<Real> column_sums) {
        if constexpr (kPair == 1) {
            gemm<Arithmetic, true>(rows, row_sums.stride, kSpan, {span_gradients_, kSpan, 1},
                                   of_columns, row_sums);
            gemm<Arithmetic, true>(kSpan, column_sums.stride, rows, {span_gradients_, 1, kSpan},
                                   of_rows, column_sums);
        } else {
            pack_pairs(rows, true);
            gemm<Arithmetic, true>(rows, row_sums.stride, kSpan / 2, {pairs_, kSpan / 2, 1},
                                   of_columns, row_sums);
            pack_pairs(rows, false);
            gemm<Arithmetic, true>(kSpan, column_sums.stride, rows / 2, {pairs_, 1, kSpan}, of_rows,
                                   column_sums);
        }
    }

    void pack_pairs(int rows, bool along_row) {
        constexpr int kLane = kLanes<Real>;
        if constexpr (kPair == 2) {
            if (along_row) {
                for (int r = 0; r < rows; ++r) {
                    const Real* row = span_gradients_ + r * kSpan;
                    Operand* target = pairs_ + r * (kSpan / 2);
                    int c = 0;
                    for (; c + 2 * kLane <= kSpan; c += 2 * kLane)
                        store(target + c / 2,
                              Arithmetic::pairs_along_row(load(row + c), load(row + c + kLane)));
                    for (; c < kSpan; c += 2)
                        target[c / 2] =
                            to_bfloat16(row[c]).bits | Operand(to_bfloat16(row[c + 1]).bits) << 16;
                }
            } else {
                for (int r = 0; r < rows; r += 2)
                    for (int c = 0; c < kSpan; c += kLane)
                        store(pairs_ + r / 2 * kSpan + c,
                              Arithmetic::pairs_along_column(
                                  load(span_gradients_ + r * kSpan + c),
                                  load(span_gradients_ + (r + 1) * kSpan + c)));
            }
        }
    }

    const Problem& problem_;
    const bool with_gradient_;
    DistanceVectors<Arithmetic> query_vectors_, key_vectors_;
    const int64_t padded_queries_;
    PackedRows<Arithmetic> queries_, keys_;
    Real *of_queries_, *of_keys_, *of_keys_transposed_;
    // The gradients of a strip and tile: by distance, and by key.
    Real *span_gradients_, *strip_gradients_;
    Operand* pairs_;
    Real *query_gradients_, *key_gradients_;

    int64_t b_ = 0, h_ = 0;
    Range tile_ = {0, 0}, strip_ = {0, 0};
    int64_t query_place_ = 0, key_place_ = 0;
    bool has_query_products_ = false, has_key_products_ = false;
};

}  // namespace bfa::BFA_ISA
