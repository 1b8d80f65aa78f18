// The relative form in a tile.
//
// For a strip of queries and a tile of keys, the products with the vectors of their distances are
// one small matrix product for each term, whose rows are shifted against each other: U P has a row
// per query, and W Q a row per key. Where all distances are beyond the same end of the tables, both
// terms are zero, or those of the last vectors: one number per query and one per key.
#pragma once

#include "none.h"
#include "relative_tensors.h"
#include "sheared_products.h"

namespace bfa::BFA_KERNELS {

// What a term has for rows of queries or keys with the vectors beyond either end of its table, and
// the gradients of these numbers.
template <class Arithmetic>
class EndProducts {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;

public:
    EndProducts(Arena& arena, int64_t rows, bool with_gradient)
        : rows_(rows),
          products_(arena.take<Real>(2 * rows)),
          gradients_(arena.take<Real>(with_gradient ? 2 * rows : 0)) {}

    // Of the rows from `first` on, which are those of a.
    void compute(int64_t first, int64_t count, const LeftMatrix<Operand>& a,
                 const DistanceVectors<Arithmetic>& vectors) {
        for (int end = 0; end < 2; ++end)
            for (int64_t row = 0; row < count; ++row)
                products_[end * rows_ + first + row] =
                    dot(a.data + row * a.row, vectors.end(end), vectors.rank());
    }
    void clear_gradients() { std::memset(gradients_, 0, 2 * rows_ * sizeof(Real)); }

    const Real* of_rows(int end) const { return products_ + end * rows_; }
    Real* gradients(int end) const { return gradients_ + end * rows_; }

    // Adds to the gradients of the rows of a, from `first` on, and of the vectors.
    void add_gradients(int64_t first, int64_t count, const LeftMatrix<Operand>& a,
                       const Result<Real>& row_gradients,
                       const DistanceVectors<Arithmetic>& vectors) const {
        for (int end = 0; end < 2; ++end) {
            const Real* vector = vectors.end(end);
            Real* vector_gradient = vectors.end_gradient(end);
            for (int64_t row = 0; row < count; ++row) {
                const Real gradient = gradients(end)[first + row];
                if (gradient == 0) continue;
                Real* row_gradient = row_gradients.data + row * row_gradients.stride;
                for (int64_t r = 0; r < vectors.rank(); ++r) {
                    row_gradient[r] += gradient * vector[r];
                    vector_gradient[r] += gradient * element(a.data + row * a.row, r);
                }
            }
        }
    }

private:
    static Real element(const Operand* row, int64_t r) {
        return Arithmetic::element(row[r / Arithmetic::pair], int(r % Arithmetic::pair));
    }
    static Real dot(const Operand* row, const Real* vector, int64_t rank) {
        Real sum = 0;
        for (int64_t r = 0; r < rank; ++r) sum += element(row, r) * vector[r];
        return sum;
    }

    const int64_t rows_;
    Real *products_, *gradients_;
};

// Arithmetic is that of the products above, which have factors in the form's own element type.
template <class Arithmetic>
class RelativeTile : public TileDefaults, RelativeTensors {
    using Real = typename Arithmetic::Real;

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

    RelativeTile(Arena& arena, const Problem& problem, bool with_gradient)
        : problem_(problem),
          with_gradient_(with_gradient),
          repeats_ends_(repeats_ends(problem)),
          query_vectors_(arena, problem, kQueryTable, true, with_gradient),
          key_vectors_(arena, problem, kKeyTable, false, with_gradient),
          padded_queries_(query_vectors_.exists() ? problem.n_query + kStripRows : 0),
          queries_(arena, query_vectors_.exists() ? kStripRows : 0, query_vectors_.rank(),
                   with_gradient),
          keys_(arena, key_vectors_.exists() ? kTile : 0, key_vectors_.rank(), with_gradient),
          query_ends_(arena, padded_queries_, with_gradient),
          key_ends_(arena, key_vectors_.exists() ? kTile : 0, with_gradient),
          query_products_(arena, query_vectors_.exists(), with_gradient),
          key_products_(arena, key_vectors_.exists(), with_gradient),
          of_keys_(arena.take<Real>(key_vectors_.exists() ? kStripRows * kTile : 0)),
          of_keys_gradient_(
              arena.take<Real>(key_vectors_.exists() && with_gradient ? 2 * kTile * kTile : 0)),
          sums_(arena.take<Real>(sum_elements())),
          key_gradients_(arena.take<Real>(with_gradient ? kTile * key_vectors_.columns() : 0)) {
        query_vectors_.keep_gradient_in(sums_ + query_gradient_elements());
        key_vectors_.keep_gradient_in(sums_ + query_gradient_elements() +
                                      query_vectors_.gradient_elements());
    }

    void begin_head(int64_t b, int64_t h) {
        b_ = b, h_ = h;
        if (query_vectors_.exists()) {
            const bool has_other_vectors = query_vectors_.begin_head(b, h);
            if (repeats_ends_ && (has_other_queries() || has_other_vectors))
                for_each_strip([&](Range strip) {
                    query_ends_.compute(strip.begin, strip.end - strip.begin, queries_.left(0),
                                        query_vectors_);
                });
            if (with_gradient_) query_ends_.clear_gradients();
        }
        if (key_vectors_.exists()) key_vectors_.begin_head(b, h);
        std::memset(sums_, 0, sum_elements() * sizeof(Real));
    }

    void begin_tile(Range keys) {
        tile_ = keys;
        if (!key_vectors_.exists()) return;
        const FormTensor& factors = problem_.form_tensors[kKeyFactors];
        const int64_t n = keys.end - keys.begin;
        keys_.pack(factors.element, factors.at<char>(b_, h_, keys.begin), factors.row, n, kTile);
        if (repeats_ends_) key_ends_.compute(0, kTile, keys_.left(0), key_vectors_);
        if (with_gradient_) {
            key_ends_.clear_gradients();
            std::memset(key_gradients_, 0, kTile * keys_.columns() * sizeof(Real));
        }
    }

    void begin_strip(Range strip) {
        strip_ = strip;
        if (query_vectors_.exists()) begin_strip_of_queries();
        if (key_vectors_.exists()) begin_strip_of_keys();
    }

    template <class Function>
    BFA_INLINE void with_row(int64_t query, Function function) const {
        const int64_t r = query - strip_.begin;
        const Real *of_query = query_products_.row(r), *of_key = of_key_ + r * key_row_;
        Real *query_gradient = query_products_.gradient_row(r),
             *key_gradient = key_gradient_ + r * key_row_;
        if (has_query_term_ && has_key_term_)
            return function(Row<true, true>{of_query, of_key, query_gradient, key_gradient});
        if (has_query_term_)
            return function(Row<true, false>{of_query, nullptr, query_gradient, nullptr});
        if (has_key_term_)
            return function(Row<false, true>{nullptr, of_key, nullptr, key_gradient});
        function(typename None::Tile<Real>::Row{});
    }

    // Each entry of a strip has one gradient. Beyond the table, that of a key is the sum of a
    // column.
    template <bool kOfQuery, bool kOfKey>
    BFA_INLINE void add_gradient(Row<kOfQuery, kOfKey>& row, int column, Vector<Real> gradient) {
        if constexpr (kOfQuery) store(row.query_gradient + column, gradient);
        if constexpr (kOfKey) add(row.key_gradient + column, gradient);
    }
    void add_gradient(typename None::Tile<Real>::Row&, int, Vector<Real>) {}

    void end_strip(Range strip) {
        if (has_query_term_) {
            if (query_end_ < 0) {
                query_products_.add_gradients(queries_.right(0), gradients_of_queries(strip.begin),
                                              query_vectors_);
            } else {
                Real* gradients = query_ends_.gradients(query_end_) + strip.begin;
                for (int r = 0; r < strip.end - strip.begin; ++r)
                    gradients[r] += query_products_.sum_of_gradients(r);
            }
        }
        if (has_key_term_ && key_end_ < 0) {
            shear(of_keys_gradient_);
            key_products_.add_gradients(keys_.right(0), gradients_of_keys(), key_vectors_);
        }
    }

    // Each row of the gradient of W belongs to one tile, so it is added to the output directly.
    void end_tile(Range keys) {
        if (!key_vectors_.exists()) return;
        const int64_t n = keys.end - keys.begin;
        key_ends_.add_gradients(0, n, keys_.left(0), gradients_of_keys(), key_vectors_);
        add_rows(problem_.grad_form[kKeyFactors], keys.begin, n, key_vectors_.rank(),
                 gradients_of_keys());
    }

    // The gradients of U, P and Q.
    static constexpr bool has_sums = true;
    int64_t sum_elements() const {
        return query_gradient_elements() + query_vectors_.gradient_elements() +
               key_vectors_.gradient_elements();
    }
    Real* end_sums() {
        if (query_vectors_.exists() && repeats_ends_)
            for_each_strip([&](Range strip) {
                query_ends_.add_gradients(strip.begin, strip.end - strip.begin, queries_.left(0),
                                          gradients_of_queries(strip.begin), query_vectors_);
            });
        return sums_;
    }

    void end_head(const FormTensor* gradients, int64_t b, int64_t h) {
        if (query_vectors_.exists()) {
            query_vectors_.end_head(gradients[kQueryTable], b, h);
            add_rows(gradients[kQueryFactors], 0, problem_.n_query, query_vectors_.rank(),
                     gradients_of_queries(0));
        }
        if (key_vectors_.exists()) key_vectors_.end_head(gradients[kKeyTable], b, h);
    }

private:
    static constexpr int kLane = kLanes<Real>;
    using QueryProducts = ShearedProducts<Arithmetic, kStripRows, kTile>;
    using KeyProducts = ShearedProducts<Arithmetic, kTile, kStripRows>;

    Result<Real> gradients_of_queries(int64_t query) const {
        return {sums_ + query * queries_.columns(), queries_.columns()};
    }
    int64_t query_gradient_elements() const {
        return with_gradient_ ? padded_queries_ * queries_.columns() : 0;
    }
    Result<Real> gradients_of_keys() const { return {key_gradients_, keys_.columns()}; }

    // Returns whether the factors are others than at the last call.
    bool has_other_queries() {
        const char* first = problem_.form_tensors[kQueryFactors].at<char>(b_, h_);
        if (first == factors_ && problem_.n_query == n_query_) return false;
        factors_ = first, n_query_ = problem_.n_query;
        return true;
    }

    // Packs the factors of a strip, and zeros after those of the last query.
    void pack_queries(int64_t begin) {
        const FormTensor& factors = problem_.form_tensors[kQueryFactors];
        queries_.pack(factors.element, factors.at<char>(b_, h_, begin), factors.row,
                      std::min<int64_t>(kStripRows, problem_.n_query - begin), kStripRows);
    }
    template <class Function>
    void for_each_strip(Function function) {
        for (int64_t begin = 0; begin < problem_.n_query; begin += kStripRows) {
            pack_queries(begin);
            function(Range{begin, std::min(begin + kStripRows, problem_.n_query)});
        }
    }

    BFA_INLINE static void add(Real* target, Vector<Real> x) { store(target, load(target) + x); }

    void begin_strip_of_queries() {
        const int64_t distance = problem_.position(strip_.begin) + kStripRows - 1 - tile_.begin;
        const int64_t place = query_vectors_.place_of(distance);
        query_end_ = query_vectors_.end_of(place);
        has_query_term_ = query_end_ < 0 || repeats_ends_;
        if (!has_query_term_) return;
        query_products_.begin(place);
        if (query_end_ < 0) {
            pack_queries(strip_.begin);
            query_products_.compute(queries_.left(0), query_vectors_);
            if (with_gradient_) query_products_.clear_margins();
        } else {
            const Real* products = query_ends_.of_rows(query_end_) + strip_.begin;
            for (int r = 0; r < strip_.end - strip_.begin; ++r)
                query_products_.fill(r, products[r]);
        }
        if (with_gradient_ && !is_whole()) query_products_.clear_rows();
    }

    // Whether every entry of the strip gets a gradient.
    bool is_whole() const {
        return strip_.end - strip_.begin == kStripRows && tile_.end - tile_.begin == kTile;
    }

    void begin_strip_of_keys() {
        const int64_t distance = problem_.position(strip_.begin) - tile_.begin - (kTile - 1);
        const int64_t place = key_vectors_.place_of(distance);
        key_end_ = key_vectors_.end_of(place);
        has_key_term_ = key_end_ < 0 || repeats_ends_;
        if (!has_key_term_) return;
        if (key_end_ >= 0) {  // all rows of the strip have the same products
            of_key_ = key_ends_.of_rows(key_end_);
            key_gradient_ = key_ends_.gradients(key_end_);
            key_row_ = 0;
            return;
        }
        of_key_ = of_keys_, key_gradient_ = of_keys_gradient_, key_row_ = kTile;
        key_products_.begin(place);
        key_products_.compute(keys_.left(0), key_vectors_);
        transpose(key_products_.row(0), kTile, kStripRows, KeyProducts::kNextRow, of_keys_);
        if (!with_gradient_) return;
        key_products_.clear_margins();
        std::memset(of_keys_gradient_, 0, kStripRows * kTile * sizeof(Real));
    }

    // Writes gradients (kStripRows, kTile) to the rows of the keys.
    void shear(const Real* gradients) {
        Real* of_key = of_keys_gradient_ + kTile * kTile;
        transpose(gradients, kStripRows, kTile, kTile, of_key);
        for (int c = 0; c < kTile; ++c)
            std::memcpy(key_products_.gradient_row(c), of_key + c * kTile,
                        kStripRows * sizeof(Real));
    }

    void add_rows(const FormTensor& out, int64_t first, int64_t count, int64_t rank,
                  const Result<Real>& gradients) const {
        for (int64_t row = 0; row < count; ++row)
            add_row(out.element, gradients.data + row * gradients.stride, rank,
                    out.at<char>(b_, h_, first + row));
    }

    const Problem& problem_;
    const bool with_gradient_, repeats_ends_;
    DistanceVectors<Arithmetic> query_vectors_, key_vectors_;
    const int64_t padded_queries_;
    PackedRows<Arithmetic> queries_, keys_;
    EndProducts<Arithmetic> query_ends_, key_ends_;
    QueryProducts query_products_;
    KeyProducts key_products_;
    Real *of_keys_, *of_keys_gradient_;  // (kStripRows, kTile); the latter twice, once transposed
    Real *sums_, *key_gradients_;

    int64_t b_ = 0, h_ = 0;
    Range tile_ = {0, 0}, strip_ = {0, 0};
    const char* factors_ = nullptr;  // those of query_ends_
    int64_t n_query_ = 0;
    int query_end_ = -1, key_end_ = -1;
    bool has_query_term_ = false, has_key_term_ = false;
    const Real* of_key_ = nullptr;
    Real* key_gradient_ = nullptr;
    int64_t key_row_ = 0;
};

}  // namespace bfa::BFA_KERNELS
