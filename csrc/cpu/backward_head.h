// The gradients of one key/value head, or of one partition of its key tiles, tile by tile.
//
// With P_ij = exp(s_ij - lse_i) and delta_i = grad_o_i . o_i - grad_lse_i:
//   dS_ij = P_ij (grad_o_i . v_j - delta_i), the gradient of the logits and so of the bias,
//   grad_v_j = sum_i P_ij grad_o_i,
//   grad_k_j = scale sum_i dS_ij q_i,
//   grad_q_i = scale sum_j dS_ij k_j.
#pragma once

#include "../sequences.h"
#include "block_products.h"
#include "ordered_sum.h"
#include "packed_table_gradient.h"

namespace bfa::BFA_KERNELS {

inline int64_t tile_count(const Problem& problem) { return (problem.n_key + kTile - 1) / kTile; }

struct PartitionedBackward : Backward {
    int partitions;  // per key/value head
};

template <class Arithmetic, class Bias>
class BackwardHead {
    using Real = typename Arithmetic::Real;
    using Queries = HeadQueries<Arithmetic>;

public:
    BackwardHead(Arena& arena, const PartitionedBackward& problem)
        : whole_(problem),
          p_(problem),
          visible_(p_),
          group_(problem.heads / problem.kv_heads),
          partitions_(problem.partitions),
          kept_tiles_(group_ == 1 ? 1 : (tile_count(problem) + partitions_ - 1) / partitions_),
          head_columns_(round_up(problem.head_dim, kLanes<Real>)),
          value_columns_(round_up(problem.value_dim, kLanes<Real>)),
          block_(arena, p_, visible_, queries_, tile_, bias_),
          tile_(arena, p_),
          bias_(arena, p_, problem.has_form_gradient()),
          grad_keys_(arena.take<Real>(kept_tiles_ * kTile * head_columns_)),
          grad_values_(arena.take<Real>(kept_tiles_ * kTile * value_columns_)),
          queries_(arena, p_),
          grad_queries_(arena.take<Real>(grad_query_elements())) {}

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
        const int64_t tiles = tile_count(p_);
        for (int64_t member = 0; member < group_; ++member) {
            begin_head(kv_head * group_ + member);
            for (int64_t tile = partition; tile < tiles; tile += partitions_)
                add_tile({tile * kTile, std::min((tile + 1) * kTile, p_.n_key)},
                         group_ == 1 ? 0 : tile / partitions_, member == 0, member == group_ - 1);
            const int64_t elements = grad_query_elements(),
                          begin = rows_before * p_.heads * head_columns_ + head_ * elements;
            grad_query_sums.add(b_ * p_.heads + head_, begin, begin + elements, partition,
                                grad_queries_);
            if (partition == partitions_ - 1)
                write_rows(p_.grad_q, head_, 0, p_.n_query, p_.head_dim, grad_queries_, p_.scale);
            if constexpr (Bias::has_gradient)
                if (p_.has_form_gradient()) add_form_gradients(partition, form_sums);
        }
    }

private:
    int64_t grad_query_elements() const { return Queries::padded(p_.n_query) * head_columns_; }

    void begin_head(int64_t head) {
        head_ = head;
        queries_.begin_head(b_, head);
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

    void add_tile(Range keys, int64_t slot, bool first_member, bool last_member) {
        tile_.begin_tile(b_, kv_head_, keys);
        all_finite_ = queries_.all_finite() && tile_.all_finite();
        grad_tile_keys_ = {grad_keys_ + slot * kTile * head_columns_, head_columns_};
        grad_tile_values_ = {grad_values_ + slot * kTile * value_columns_, value_columns_};
        if (first_member) {
            std::memset(grad_tile_keys_.data, 0, kTile * head_columns_ * sizeof(Real));
            std::memset(grad_tile_values_.data, 0, kTile * value_columns_ * sizeof(Real));
        }
        bias_.begin_tile(keys);
        const Range queries = visible_.queries(keys);
        for (int64_t i = queries.begin / kRegisterRows * kRegisterRows; i < queries.end;
             i += kBlockRows)
            add_block({i, std::min(i + kBlockRows, queries.end)}, keys);
        if (last_member) {
            const int64_t n = keys.end - keys.begin;
            write_rows(p_.grad_k, kv_head_, keys.begin, n, p_.head_dim, grad_tile_keys_.data,
                       p_.scale);
            write_rows(p_.grad_v, kv_head_, keys.begin, n, p_.value_dim, grad_tile_values_.data,
                       1.0);
        }
        if constexpr (Bias::has_gradient)
            if (p_.has_form_gradient()) bias_.end_tile(keys);
    }

    void add_block(Range queries, Range keys) {
        const bool trains_bias = Bias::has_gradient && p_.has_form_gradient();
        const bool masked = trains_bias ? add_strips<Bias::has_gradient>(queries, keys)
                                        : add_strips<false>(queries, keys);
        if constexpr (Bias::has_gradient)
            if (trains_bias) bias_.end_block(keys);
        const RowGradients<Real> gradients = {
            {grad_queries_ + queries.begin * head_columns_, head_columns_},
            grad_tile_keys_,
            grad_tile_values_};
        if (masked && !all_finite_)
            add_visible_products(queries, visible_, queries_, tile_, block_, gradients);
        else
            add_products(queries, queries_, tile_, block_, gradients);
    }

    // Returns whether some pairs of the block are masked.
    template <bool kBiasGradient>
    bool add_strips(Range queries, Range keys) {
        bool masked = false;
        for (int64_t i = queries.begin; i < queries.end; i += kStripRows) {
            const Range strip = {i, std::min(i + kStripRows, queries.end)};
            if (coverage(visible_, strip, keys) == Coverage::full) {
                block_.template add<false, kBiasGradient>(strip, queries.begin);
            } else {
                masked = true;
                block_.template add<true, kBiasGradient>(strip, queries.begin);
            }
        }
        return masked;
    }

    void write_rows(const View& target, int64_t head, int64_t begin, int64_t count,
                    int64_t channels, const Real* source, double factor) {
        const int64_t stride = round_up(channels, kLanes<Real>);
        for (int64_t r = 0; r < count; ++r)
            write_row(p_.element, source + r * stride, Real(factor), channels,
                      target.at(b_, head, begin + r));
    }

    const Backward& whole_;
    Backward p_;  // the problem of the current sequence
    Visibility visible_;
    const int64_t group_;
    const int partitions_;
    const int64_t kept_tiles_, head_columns_, value_columns_;
    StripGradients<Arithmetic, Bias> block_;
    TileKeys<Arithmetic> tile_;
    Bias bias_;
    Real *grad_keys_, *grad_values_;
    Queries queries_;
    Real* grad_queries_;

    int64_t b_, kv_head_, head_;
    bool all_finite_;
    Result<Real> grad_tile_keys_, grad_tile_values_;
};

}  // namespace bfa::BFA_KERNELS
