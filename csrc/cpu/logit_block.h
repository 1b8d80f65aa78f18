// The logits of one block of queries of one head, key tile by key tile, in base 2:
// (scale q_i.k_j + b_ij) / ln 2, or -inf where query i does not attend to key j.
#pragma once

#include <algorithm>
#include <limits>

#include "gemm.h"
#include "math.h"
#include "visibility.h"
#include "workspace.h"

namespace bfa::BFA_KERNELS {

template <class Arithmetic, class Bias>
class LogitBlock {
protected:
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    static constexpr int kLane = kLanes<Real>;
    static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();
    static_assert(kStripRows % kRegisterRows == 0 && kStripRows % kLane == 0);

    LogitBlock(Arena& arena, const Problem& problem, int64_t rows)
        : problem_(problem),
          visible_(problem_),
          depth_(round_up(problem.head_dim, Arithmetic::pair) / Arithmetic::pair),
          bias_(arena, problem_, false),
          queries_(arena.take<Operand>(rows * depth_)),
          keys_(arena.take<Operand>(kTile * depth_)),
          keys_transposed_(arena.take<Operand>(depth_ * kTile)) {}

    // Returns the number of rows, padded to a multiple of kRegisterRows.
    int64_t begin_block(int64_t b, int64_t h, Range queries) {
        b_ = b, h_ = h, kv_head_ = h / (problem_.heads / problem_.kv_heads), block_ = queries;
        const int64_t count = queries.end - queries.begin;
        const int64_t padded = round_up(count, kRegisterRows);
        Arithmetic::pack_rows(problem_.element, problem_.q.at(b, h, queries.begin),
                              problem_.q.row_stride, count, problem_.head_dim, queries_, depth_);
        std::memset(queries_ + count * depth_, 0, (padded - count) * depth_ * sizeof(Operand));
        bias_.begin_head(b, h);
        visible_.begin_head(b, h);
        return padded;
    }

    void begin_tile(Range keys) {
        const int n = int(keys.end - keys.begin);
        width_ = int(round_up(n, kLane * Arithmetic::pair));
        Arithmetic::pack_rows(problem_.element, problem_.k.at(b_, kv_head_, keys.begin),
                              problem_.k.row_stride, n, problem_.head_dim, keys_, depth_);
        std::memset(keys_ + n * depth_, 0, (width_ - n) * depth_ * sizeof(Operand));
        transpose(keys_, width_, depth_, depth_, keys_transposed_);
        bias_.begin_tile(keys);
    }

    Range tile(int64_t number) const {
        return {number * kTile, std::min((number + 1) * kTile, problem_.n_key)};
    }

    Range strip(int64_t row) const {
        const int64_t query = block_.begin + row;
        return {query, std::min(query + kStripRows, block_.end)};
    }

    // The numbers of rows and columns of a strip that are computed: up to its last visible key.
    template <bool kMasked>
    int rows(Range strip) const {
        return kMasked ? int(round_up(strip.end - strip.begin, kRegisterRows)) : kStripRows;
    }
    template <bool kMasked>
    int width(Range strip, Range keys) const {
        if (!kMasked) return kTile;
        const int64_t end = visible_.keys(strip.end - 1).end - keys.begin;
        return int(std::min<int64_t>(round_up(end, kLane * Arithmetic::pair), width_));
    }

    // Writes the logits of row r of the strip to logits + r * kTile, and calls end_row(r, largest),
    // where largest holds the maximum of each lane.
    template <bool kMasked, class Function>
    BFA_INLINE void compute(Range strip, Range keys, Real* logits, Function end_row) {
        const int rows = this->rows<kMasked>(strip), width = this->width<kMasked>(strip, keys);
        const int64_t row = strip.begin - block_.begin;
        gemm<Arithmetic, false>(rows, width, depth_, {queries_ + row * depth_, depth_, 1},
                                {keys_transposed_, kTile}, {logits, kTile});
        const Vector<Real> scale = broadcast(Real(problem_.scale * kLog2e));
        bias_.begin_strip(strip);
        for (int r = 0; r < rows; ++r) {
            const int64_t query = std::min(strip.begin + r, strip.end - 1);
            const Range visible =
                kMasked ? visible_.keys(query).relative_to(keys.begin, kTile) : keys;
            Vector<Real> largest = broadcast(-kInfinity);
            bias_.with_row(query, [&](auto bias) {
#pragma GCC unroll 4
                for (int c = 0; c < width; c += kLane) {
                    Vector<Real> s = bias.added_to(load(logits + r * kTile + c) * scale, c);
                    if (kMasked) s = where_visible<Real>(visible, c, s, broadcast(-kInfinity));
                    store(logits + r * kTile + c, s);
                    largest = max<Real>(s, largest);
                }
            });
            end_row(r, largest);
        }
    }

    Problem problem_;  // the problem of the current sequence
    Visibility visible_;
    const int64_t depth_;
    Bias bias_;
    Operand *queries_, *keys_, *keys_transposed_;

    int64_t b_, h_, kv_head_;
    Range block_;
    int width_;
};

}  // namespace bfa::BFA_KERNELS
