// The gradients of one key/value head, or of one partition of its key tiles, tile by tile.
//
// With P_ij = exp(s_ij - lse_i) and delta_i = grad_o_i . o_i - grad_lse_i:
//   dS_ij = P_ij (grad_o_i . v_j - delta_i), the gradient of the logits and so of the bias,
//   grad_v_j = sum_i P_ij grad_o_i,
//   grad_k_j = scale sum_i dS_ij q_i,
//   grad_q_i = scale sum_j dS_ij k_j.
#pragma once

#include <cmath>
#include <limits>

#include "../sequences.h"
#include "gemm.h"
#include "math.h"
#include "ordered_sum.h"
#include "packed_rows.h"
#include "packed_table_gradient.h"
#include "visibility.h"

namespace bfa::BFA_KERNELS {

constexpr int kBlockRows = 96;  // queries per block: P and dS stay in the L1 and L2 caches

inline int64_t tile_count(const Problem& problem) { return (problem.n_key + kTile - 1) / kTile; }

struct PartitionedBackward : Backward {
    int partitions;  // per key/value head
};

template <class Arithmetic, class Bias>
class BackwardHead {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    static constexpr int kLane = kLanes<Real>;
    static constexpr int kPair = Arithmetic::pair;
    static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

public:
    BackwardHead(Arena& arena, const PartitionedBackward& problem)
        : whole_(problem),
          p_(problem),
          visible_(p_),
          group_(problem.heads / problem.kv_heads),
          partitions_(problem.partitions),
          padded_queries_(padded(problem.n_query)),
          kept_tiles_(group_ == 1 ? 1 : (tile_count(problem) + partitions_ - 1) / partitions_),
          weights_(arena.take<Operand>(kBlockRows / kPair * kTile)),
          grad_logits_(arena.take<Operand>(kBlockRows / kPair * kTile)),
          grad_logit_rows_(kPair == 1 ? grad_logits_
                                      : arena.take<Operand>(kBlockRows * kTile / kPair)),
          strip_(arena.take<Real>(kPair == 1 ? 0 : 2 * kStripRows * kTile)),
          keys_(arena, kTile, problem.head_dim),
          values_(arena, kTile, problem.value_dim),
          keys_transposed_(arena.take<Operand>(keys_.depth() * kTile)),
          values_transposed_(arena.take<Operand>(values_.depth() * kTile)),
          bias_(arena, p_, problem.has_form_gradient()),
          row_(arena.take<Real>(2 * problem.value_dim)),
          grad_keys_(arena.take<Real>(kept_tiles_ * kTile * keys_.columns())),
          grad_values_(arena.take<Real>(kept_tiles_ * kTile * values_.columns())),
          queries_(arena, padded_queries_, problem.head_dim),
          grad_outputs_(arena, padded_queries_, problem.value_dim),
          grad_queries_(arena.take<Real>(grad_query_elements())),
          lse_(arena.take<Real>(problem.n_query)),
          delta_(arena.take<Real>(problem.n_query)) {}

    int64_t grad_query_elements() const { return padded_queries_ * queries_.columns(); }
    int64_t form_sum_elements() const {
        if constexpr (Bias::has_sums) return bias_.sum_elements();
        return 0;
    }

    // rows_before: the number of padded queries of all earlier sequences.
    void run(int64_t b, int64_t kv_head, int partition, int64_t rows_before,
             OrderedSum<Real>& grad_query_sums, OrderedSum<Real>& form_sums,
             const PackedTableGradient<Real>& tables) {
        b_ = b, kv_head_ = kv_head;
        if (whole_.sequences) p_ = sequence_problem(whole_, b);
        tables.redirect(b, p_);
        padded_queries_ = padded(p_.n_query);
        const int64_t tiles = tile_count(p_);
        for (int64_t member = 0; member < group_; ++member) {
            begin_head(kv_head * group_ + member);
            for (int64_t tile = partition; tile < tiles; tile += partitions_)
                add_tile({tile * kTile, std::min((tile + 1) * kTile, p_.n_key)},
                         group_ == 1 ? 0 : tile / partitions_, member == 0, member == group_ - 1);
            const int64_t begin =
                (rows_before * p_.heads + head_ * padded_queries_) * queries_.columns();
            grad_query_sums.add(b_ * p_.heads + head_, begin, begin + grad_query_elements(),
                                partition, grad_queries_);
            if (partition == partitions_ - 1)
                write_rows(p_.grad_q, head_, 0, p_.n_query, p_.head_dim, grad_queries_, p_.scale);
            if constexpr (Bias::has_gradient)
                if (p_.has_form_gradient()) add_form_gradients(partition, form_sums);
        }
    }

    static int64_t padded(int64_t n_query) { return round_up(n_query, kRegisterRows); }

private:
    void begin_head(int64_t head) {
        head_ = head;
        queries_.pack(p_.element, p_.q.at(b_, head), p_.q.row, p_.n_query, padded_queries_);
        grad_outputs_.pack(p_.element, p_.grad_o.at(b_, head), p_.grad_o.row, p_.n_query,
                           padded_queries_);
        queries_finite_ =
            queries_.all_finite(padded_queries_) && grad_outputs_.all_finite(padded_queries_);
        for (int64_t i = 0; i < p_.n_query; ++i) {
            const Real lse = p_.lse.at<Real>(b_, head)[i];
            // A query without visible keys has lse = -inf; +inf instead makes its P all 0.
            lse_[i] = lse == -kInfinity ? kInfinity : Real(double(lse) * kLog2e);
            delta_[i] = lse == -kInfinity
                            ? 0
                            : dot_rows(p_.o.at(b_, head, i), p_.grad_o.at(b_, head, i)) -
                                  p_.grad_lse.at<Real>(b_, head)[i];
        }
        std::memset(grad_queries_, 0, grad_query_elements() * sizeof(Real));
        bias_.begin_head(b_, head);
        visible_.begin_head(b_, head);
    }

    void add_form_gradients(int partition, OrderedSum<Real>& form_sums) {
        const int64_t head = b_ * p_.heads + head_, elements = form_sum_elements();
        Real* sums = nullptr;
        if constexpr (Bias::has_sums) sums = bias_.end_sums();
        form_sums.add(head, head * elements, (head + 1) * elements, partition, sums, [&] {
            if (!Bias::has_sums || partition == partitions_ - 1)
                bias_.end_head(p_.grad_form, b_, head_);
        });
    }

    Real dot_rows(const char* a, const char* b) {
        Real* other = row_ + p_.value_dim;
        read_row(p_.element, a, p_.value_dim, row_);
        read_row(p_.element, b, p_.value_dim, other);
        double sum = 0;
        for (int64_t c = 0; c < p_.value_dim; ++c) sum += double(row_[c]) * double(other[c]);
        return Real(sum);
    }

    void add_tile(Range keys, int64_t slot, bool first_member, bool last_member) {
        const int n = int(keys.end - keys.begin);
        width_ = int(round_up(n, kLane * kPair));
        keys_.pack(p_.element, p_.k.at(b_, kv_head_, keys.begin), p_.k.row, n, width_);
        keys_.transpose_to(keys_transposed_, width_);
        values_.pack(p_.element, p_.v.at(b_, kv_head_, keys.begin), p_.v.row, n, width_);
        values_.transpose_to(values_transposed_, width_);
        finite_ = queries_finite_ && keys_.all_finite(width_);

        tile_grad_keys_ = {grad_keys_ + slot * kTile * keys_.columns(), keys_.columns()};
        tile_grad_values_ = {grad_values_ + slot * kTile * values_.columns(), values_.columns()};
        if (first_member) {
            std::memset(tile_grad_keys_.data, 0, kTile * keys_.columns() * sizeof(Real));
            std::memset(tile_grad_values_.data, 0, kTile * values_.columns() * sizeof(Real));
        }
        bias_.begin_tile(keys);
        const Range queries = visible_.queries(keys);
        for (int64_t i = queries.begin / kRegisterRows * kRegisterRows; i < queries.end;
             i += kBlockRows)
            add_block({i, std::min(i + kBlockRows, queries.end)}, keys);
        if (last_member) {
            write_rows(p_.grad_k, kv_head_, keys.begin, n, p_.head_dim, tile_grad_keys_.data,
                       p_.scale);
            write_rows(p_.grad_v, kv_head_, keys.begin, n, p_.value_dim, tile_grad_values_.data,
                       1.0);
        }
        if constexpr (Bias::has_gradient)
            if (p_.has_form_gradient()) bias_.end_tile(keys);
    }

    void add_block(Range queries, Range keys) {
        bool masked = false;
        for (int64_t i = queries.begin; i < queries.end; i += kStripRows) {
            const Range strip = {i, std::min(i + kStripRows, queries.end)};
            const bool partial = coverage(visible_, strip, keys) != Coverage::full;
            masked |= partial;
            const bool with_bias_gradient = Bias::has_gradient && p_.has_form_gradient();
            if (partial) {
                with_bias_gradient ? add_strip<true, true>(strip, keys, queries.begin)
                                   : add_strip<true, false>(strip, keys, queries.begin);
            } else {
                with_bias_gradient ? add_strip<false, true>(strip, keys, queries.begin)
                                   : add_strip<false, false>(strip, keys, queries.begin);
            }
        }
        if constexpr (Bias::has_gradient)
            if (p_.has_form_gradient()) bias_.end_block(keys);
        const int rows = int(round_up(queries.end - queries.begin, kRegisterRows));
        const Result<Real> grad_queries = {grad_queries_ + queries.begin * queries_.columns(),
                                           queries_.columns()};
        const LeftMatrix<Operand> weights = {weights_, 1, kTile};
        const LeftMatrix<Operand> grad_logits = {grad_logits_, 1, kTile};
        const LeftMatrix<Operand> grad_logit_rows = {grad_logit_rows_, kTile / kPair, 1};
        if (masked && !finite_) {
            const auto queries_of_key = [&](int key) {
                const int64_t j = keys.begin + key;
                return visible_.queries({j, j + 1})
                    .relative_to(queries.begin, queries.end - queries.begin);
            };
            const auto keys_of_query = [&](int row) {
                return visible_.keys(queries.begin + row)
                    .relative_to(keys.begin, keys.end - keys.begin);
            };
            const int n_keys = int(keys.end - keys.begin),
                      n_queries = int(queries.end - queries.begin);
            gemm_visible<Arithmetic>(n_keys, values_.columns(), weights,
                                     grad_outputs_.right(queries.begin), tile_grad_values_,
                                     queries_of_key);
            gemm_visible<Arithmetic>(n_keys, keys_.columns(), grad_logits,
                                     queries_.right(queries.begin), tile_grad_keys_,
                                     queries_of_key);
            gemm_visible<Arithmetic>(n_queries, keys_.columns(), grad_logit_rows, keys_.right(0),
                                     grad_queries, keys_of_query);
            return;
        }
        gemm<Arithmetic, true>(width_, values_.columns(), rows / kPair, weights,
                               grad_outputs_.right(queries.begin), tile_grad_values_);
        gemm<Arithmetic, true>(width_, keys_.columns(), rows / kPair, grad_logits,
                               queries_.right(queries.begin), tile_grad_keys_);
        gemm<Arithmetic, true>(rows, keys_.columns(), width_ / kPair, grad_logit_rows,
                               keys_.right(0), grad_queries);
    }

    // Computes P and dS of a strip, stores them in the operand layouts of the block, and adds to
    // the gradient of the bias.
    template <bool kMasked, bool kBiasGradient>
    void add_strip(Range strip, Range keys, int64_t block_begin) {
        const int64_t block_row = strip.begin - block_begin;
        const int rows =
            kMasked ? int(round_up(strip.end - strip.begin, kRegisterRows)) : kStripRows;
        const int width = kMasked ? width_ : kTile;
        Real *weights = strip_, *grad_logits = strip_ + kStripRows * kTile;
        if constexpr (kPair == 1) {
            weights = weights_ + block_row * kTile;
            grad_logits = grad_logits_ + block_row * kTile;
        }
        gemm<Arithmetic, false>(rows, width, queries_.depth(), queries_.left(strip.begin),
                                {keys_transposed_, kTile}, {weights, kTile});
        gemm<Arithmetic, false>(rows, width, grad_outputs_.depth(), grad_outputs_.left(strip.begin),
                                {values_transposed_, kTile}, {grad_logits, kTile});
        bias_.begin_strip(strip);
        for (int first = 0; first < rows; first += kLane) {
            const int last = std::min(first + kLane, rows);
            for (int r = first; r < last; ++r)
                add_row<kMasked, kBiasGradient>(strip.begin + r, r - first, keys, width,
                                                weights + r * kTile, grad_logits + r * kTile);
            if constexpr (kBiasGradient && Bias::has_gradient)
                bias_.end_rows({strip.begin + first, std::min(strip.begin + last, strip.end)});
        }
        if constexpr (kBiasGradient && Bias::has_gradient) bias_.end_strip(strip);
        if constexpr (kPair == 2) store_pairs(block_row, rows, width, weights, grad_logits);
    }

    // On entry weights = q.k and grad_logits = grad_o.v; on return weights = P and grad_logits =
    // dS.
    template <bool kMasked, bool kBiasGradient>
    BFA_INLINE void add_row(int64_t query, int r, Range keys, int width, Real* weights,
                            Real* grad_logits) {
        if (query >= p_.n_query) {  // a padding row
            std::memset(weights, 0, width * sizeof(Real));
            std::memset(grad_logits, 0, width * sizeof(Real));
            return;
        }
        const Vector<Real> scale = broadcast(Real(p_.scale * kLog2e));
        const Vector<Real> lse = broadcast(lse_[query]), delta = broadcast(delta_[query]);
        const Range visible = kMasked ? visible_.keys(query).relative_to(keys.begin, kTile) : keys;
        bias_.with_row(query, [&](auto bias) {
#pragma GCC unroll 4
            for (int c = 0; c < width; c += kLane) {
                const Vector<Real> logits = bias.added_to(load(weights + c) * scale, c);
                Vector<Real> weight = exp2<Arithmetic::approximate_exp2>(logits - lse);
                Vector<Real> grad_logit = weight * (load(grad_logits + c) - delta);
                if (kMasked) {
                    weight = where_visible<Real>(visible, c, weight, Vector<Real>{});
                    grad_logit = where_visible<Real>(visible, c, grad_logit, Vector<Real>{});
                }
                store(weights + c, weight);
                store(grad_logits + c, grad_logit);
                if constexpr (kBiasGradient && Bias::has_gradient)
                    bias_.add_gradient(bias, c, grad_logit);
            }
            if constexpr (kBiasGradient && Bias::has_gradient) bias_.end_row(bias, r);
        });
    }

    void store_pairs(int64_t block_row, int rows, int width, const Real* weights,
                     const Real* grad_logits) {
        for (int r = 0; r < rows; ++r) {
            const Real* row = grad_logits + r * kTile;
            Operand* target = grad_logit_rows_ + (block_row + r) * kTile / 2;
            for (int c = 0; c < width; c += 2 * kLane)
                store(target + c / 2,
                      Arithmetic::pairs_along_row(load(row + c), load(row + c + kLane)));
        }
        for (int r = 0; r < rows; r += 2) {
            const int64_t target = (block_row + r) / 2 * kTile;
            for (int c = 0; c < width; c += kLane) {
                const int upper = r * kTile + c, lower = upper + kTile;
                store(weights_ + target + c,
                      Arithmetic::pairs_along_column(load(weights + upper), load(weights + lower)));
                store(grad_logits_ + target + c,
                      Arithmetic::pairs_along_column(load(grad_logits + upper),
                                                     load(grad_logits + lower)));
            }
        }
    }

    void write_rows(const View& target, int64_t head, int64_t begin, int64_t count,
                    int64_t channels, const Real* source, double factor) {
        const int64_t stride = round_up(channels, kLane);
        for (int64_t r = 0; r < count; ++r)
            write_row(p_.element, source + r * stride, Real(factor), channels,
                      target.at(b_, head, begin + r));
    }

    const Backward& whole_;
    Backward p_;  // the problem of the current sequence
    Visibility visible_;
    const int64_t group_;
    const int partitions_;
    int64_t padded_queries_;
    const int64_t kept_tiles_;
    // Contiguous, the most frequently used buffers first. On the stack, whose address differs
    // between processes, the weights of a strip made some processes 10 % slower.
    Operand *weights_, *grad_logits_, *grad_logit_rows_;
    Real* strip_;
    PackedRows<Arithmetic> keys_, values_;
    Operand *keys_transposed_, *values_transposed_;
    Bias bias_;
    Real *row_, *grad_keys_, *grad_values_;
    PackedRows<Arithmetic> queries_, grad_outputs_;
    Real *grad_queries_, *lse_, *delta_;

    int64_t b_, kv_head_, head_;
    int width_;
    bool queries_finite_, finite_;
    Result<Real> tile_grad_keys_, tile_grad_values_;
};

}  // namespace bfa::BFA_KERNELS
