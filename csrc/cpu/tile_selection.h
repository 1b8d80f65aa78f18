// Selects the tiles of a cache that decoding computes. The others provably hold at most a fraction
// `tolerance` of the softmax mass.
//
// With c the centre of a tile's keys, r the largest |k_j - c| and n their number,
//
//     sum_j exp(scale q_i . k_j + b_ij) <= n exp(scale q_i . c + |scale| |q_i| r + max_j b_ij),
//
// which is compared with the sum over the keys nearest to the queries. See DESIGN.md, "Certified
// skipping" and "Decoding".
#pragma once

#include "dot_products.h"
#include "forms/page.h"

namespace bfa::BFA_KERNELS {

template <class Arithmetic>
class TileChoice {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;

public:
    TileChoice(Arena& arena, const Decode& problem, int rows, int64_t depth)
        : p_(problem),
          depth_(depth),
          rounding_(constants::ROUNDING *
                    double(constants::ROUNDING_PER_CHANNEL * problem.head_dim +
                           constants::ROUNDING_CONSTANT)),
          centres_(arena.take<Operand>(problem.tolerance > 0 ? kTile * depth : 0)),
          products_(arena.take<Real>(problem.tolerance > 0 ? rows * kTile : 0)),
          lengths_(arena.take<double>(rows)),
          budgets_(arena.take<double>(rows)),
          spent_(arena.take<double>(rows)) {}

    // queries: the rows of the block as operands. longest: the largest norm of a near key.
    // near_lse(row): the lse of a row over the near keys.
    template <class NearLse>
    void begin_block(const RowBlock& block, const Operand* queries, double longest,
                     NearLse near_lse) {
        block_ = &block, queries_ = queries;
        for (int r = 0; r < block.rows; ++r) {
            const double lse = near_lse(r);
            lengths_[r] = std::abs(p_.scale) *
                          std::sqrt(length_squared<Arithmetic>(queries + r * depth_, depth_));
            const double uncertain =
                constants::ROUNDING_FLOOR + rounding_ * (1 + lengths_[r] * longest + std::abs(lse));
            budgets_[r] = std::log(p_.tolerance / double(p_.tile_keys())) + lse - uncertain;
            spent_[r] = 0;
        }
    }

    // Writes the tiles that cannot be skipped to `taken`, and returns their number.
    int64_t choose(const PageBias<Real>& bias, Range tiles, int32_t* taken) {
        int64_t count = 0;
        for (int64_t tile = tiles.begin; tile < tiles.end; tile += kTile) {
            const int n = int(std::min<int64_t>(kTile, tiles.end - tile));
            multiply_centres(tile, n);
            for (int r = 0; r < block_->rows; ++r) bound(bias, r, tile, n);
            for (int x = 0; x < n; ++x)
                if (!skip(x)) taken[count++] = int32_t(tile + x);
        }
        return count;
    }

private:
    Range keys_of(int64_t tile) const {
        return {tile * p_.tile_keys(), (tile + 1) * p_.tile_keys()};
    }

    void multiply_centres(int64_t tile, int n) {
        const Operand* rows[kTile];
        for (int x = 0; x < n; ++x) {
            slots_[x] = slot_of(p_, block_->b, keys_of(tile + x).begin);
            rows[x] = centres_ + x * depth_;
            Arithmetic::pack_rows(p_.element, tile_at<char>(p_.centres, slots_[x], block_->kv_head),
                                  0, 1, p_.head_dim, centres_ + x * depth_, depth_);
            const Real* extent = tile_at<Real>(p_.extents, slots_[x], block_->kv_head);
            extents_[x] = double(extent[0]) + rounding_ * double(extent[1]);
        }
        Dots<Arithmetic>::all(block_->rows, n, depth_, queries_, rows, products_, [](int, int) {});
    }

    // Replaces the products of a row with the centres by bounds on the softmax mass of the tiles,
    // as fractions of the mass that may be skipped.
    void bound(const PageBias<Real>& bias, int r, int64_t tile, int n) {
        Real* row = products_ + r * kTile;
        for (int x = 0; x < n; ++x) {
            const double logit = p_.scale * double(row[x]) + lengths_[r] * extents_[x] +
                                 bias.highest(r, keys_of(tile + x), slots_[x]);
            row[x] = Real((logit - budgets_[r]) * kLog2e);
        }
        for (int x = 0; x < n; x += kLanes<Real>) store(row + x, exp2(load(row + x)));
    }

    // Whether tile x fits in the remaining budget of every row, to which it is then charged. A NaN
    // bound never fits.
    bool skip(int x) {
        for (int r = 0; r < block_->rows; ++r)
            if (!(spent_[r] + double(products_[r * kTile + x]) <= 1)) return false;
        for (int r = 0; r < block_->rows; ++r) spent_[r] += double(products_[r * kTile + x]);
        return true;
    }

    const Decode& p_;
    const int64_t depth_;
    const double rounding_;  // relative rounding error of a logit
    Operand* centres_;
    Real* products_;
    double* lengths_;  // |scale q|
    double* budgets_;  // log of the bound on a tile's largest term that uses up the tolerance
    double* spent_;    // the fraction of the tolerance already used
    PageSlot slots_[kTile];
    double extents_[kTile];
    const RowBlock* block_ = nullptr;
    const Operand* queries_ = nullptr;
};

}  // namespace bfa::BFA_KERNELS
