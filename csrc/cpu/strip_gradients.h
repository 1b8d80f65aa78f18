// P and dS of a block of queries and a tile of keys, computed strip by strip and kept as operands
// of the products that follow.
#pragma once

#include "backward_operands.h"

namespace bfa::BFA_KERNELS {

constexpr int kBlockRows = 96;  // queries per block: P and dS stay in the L1 and L2 caches

template <class Arithmetic, class Bias>
class StripGradients {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    static constexpr int kLane = kLanes<Real>;
    static constexpr int kPair = Arithmetic::pair;

public:
    StripGradients(Arena& arena, const Problem& problem, const Visibility& visible,
                   const HeadQueries<Arithmetic>& head, const TileKeys<Arithmetic>& tile,
                   Bias& bias)
        : p_(problem),
          visible_(visible),
          head_(head),
          tile_(tile),
          bias_(bias),
          weights_(arena.take<Operand>(kBlockRows / kPair * kTile)),
          grad_logits_(arena.take<Operand>(kBlockRows / kPair * kTile)),
          grad_logit_rows_(kPair == 1 ? grad_logits_
                                      : arena.take<Operand>(kBlockRows * kTile / kPair)),
          strip_(arena.take<Real>(kPair == 1 ? 0 : 2 * kStripRows * kTile)) {}

    // Operands for products that contract queries: P^T and dS^T.
    LeftMatrix<Operand> weights_per_key() const { return {weights_, 1, kTile}; }
    LeftMatrix<Operand> grad_logits_per_key() const { return {grad_logits_, 1, kTile}; }
    // For products that contract keys: dS.
    LeftMatrix<Operand> grad_logits_per_query() const {
        return {grad_logit_rows_, kTile / kPair, 1};
    }

    // Computes P and dS of a strip, and adds to the gradient of the bias. block_begin: the first
    // query of the block.
    template <bool kMasked, bool kBiasGradient>
    void add(Range strip, int64_t block_begin) {
        const int64_t block_row = strip.begin - block_begin;
        const int rows =
            kMasked ? int(round_up(strip.end - strip.begin, kRegisterRows)) : kStripRows;
        const int width = kMasked ? tile_.width() : kTile;
        Real *weights = strip_, *grad_logits = strip_ + kStripRows * kTile;
        if constexpr (kPair == 1) {
            weights = weights_ + block_row * kTile;
            grad_logits = grad_logits_ + block_row * kTile;
        }
        const PackedRows<Arithmetic>&queries = head_.queries(),
              &grad_outputs = head_.grad_outputs();
        gemm<Arithmetic, false>(rows, width, queries.depth(), queries.left(strip.begin),
                                tile_.keys_transposed(), {weights, kTile});
        gemm<Arithmetic, false>(rows, width, grad_outputs.depth(), grad_outputs.left(strip.begin),
                                tile_.values_transposed(), {grad_logits, kTile});
        bias_.begin_strip(strip);
        for (int first = 0; first < rows; first += kLane) {
            const int last = std::min(first + kLane, rows);
            for (int r = first; r < last; ++r)
                compute_row<kMasked, kBiasGradient>(strip.begin + r, r - first, width,
                                                    weights + r * kTile, grad_logits + r * kTile);
            if constexpr (kBiasGradient)
                bias_.end_rows({strip.begin + first, std::min(strip.begin + last, strip.end)});
        }
        if constexpr (kBiasGradient) bias_.end_strip(strip);
        if constexpr (kPair == 2) store_pairs(block_row, rows, width, weights, grad_logits);
    }

private:
    // On entry weights = q.k and grad_logits = grad_o.v; on return weights = P and grad_logits =
    // dS.
    template <bool kMasked, bool kBiasGradient>
    BFA_INLINE void compute_row(int64_t query, int r, int width, Real* weights, Real* grad_logits) {
        if (query >= p_.n_query) {  // a padding row
            std::memset(weights, 0, width * sizeof(Real));
            std::memset(grad_logits, 0, width * sizeof(Real));
            return;
        }
        const Vector<Real> scale = broadcast(Real(p_.scale * kLog2e));
        const Vector<Real> pivot = broadcast(head_.pivot(query)),
                           log_sum = broadcast(head_.log_sum(query)),
                           delta = broadcast(head_.delta(query));
        const Range keys = tile_.range();
        const Range visible = kMasked ? visible_.keys(query).relative_to(keys.begin, kTile) : keys;
        bias_.with_row(query, [&](auto bias) {
#pragma GCC unroll 4
            for (int c = 0; c < width; c += kLane) {
                const Vector<Real> logits = bias.added_to(load(weights + c) * scale, c);
                Vector<Real> weight = exp2<Arithmetic::approximate_exp2>(logits - pivot - log_sum);
                Vector<Real> grad_logit = weight * (load(grad_logits + c) - delta);
                if (kMasked) {
                    weight = where_visible<Real>(visible, c, weight, Vector<Real>{});
                    grad_logit = where_visible<Real>(visible, c, grad_logit, Vector<Real>{});
                }
                store(weights + c, weight);
                store(grad_logits + c, grad_logit);
                if constexpr (kBiasGradient) bias_.add_gradient(bias, c, grad_logit);
            }
            if constexpr (kBiasGradient) bias_.end_row(bias, r);
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

    const Problem& p_;
    const Visibility& visible_;
    const HeadQueries<Arithmetic>& head_;
    const TileKeys<Arithmetic>& tile_;
    Bias& bias_;
    // Contiguous, the most frequently used buffers first. On the stack, whose address differs
    // between processes, the weights of a strip made some processes 10 % slower.
    Operand *weights_, *grad_logits_, *grad_logit_rows_;
    Real* strip_;
};

}  // namespace bfa::BFA_KERNELS
