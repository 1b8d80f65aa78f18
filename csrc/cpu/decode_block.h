// Adds the tiles of a paged cache, one at a time, to the online softmax of a block of queries.
#pragma once

#include "online_softmax.h"
#include "select_form.h"
#include "tile_selection.h"
#include "unpacked_rows.h"

namespace bfa::BFA_KERNELS {

// Blocks of at most this many rows use dot products with keys in place. Larger ones amortize
// transposing a tile for a matrix product.
constexpr int kMaxDotRows = 16;
// Rows per block at most. Large blocks amortize the packing of a tile.
constexpr int64_t kMaxRows = 512;

inline int64_t block_queries(const Decode& p) {
    return std::clamp<int64_t>(kMaxRows / p.group(), 1, std::max<int64_t>(p.n_query, 1));
}
inline int64_t block_rows(const Decode& p) { return block_queries(p) * p.group(); }

// The rows of the next tile, which are prefetched while the current one is computed.
struct Prefetch {
    const char *keys = nullptr, *values = nullptr;
    int64_t key_row = 0, value_row = 0, key_bytes = 0, value_bytes = 0;

    BFA_INLINE void prefetch_keys(int64_t begin, int64_t end) const {
        if (keys) prefetch_rows(keys, key_row, key_bytes, begin, end);
    }
    BFA_INLINE void prefetch_values(int64_t begin, int64_t end) const {
        if (values) prefetch_rows(values, value_row, value_bytes, begin, end);
    }

private:
    // Row by row, because the rows of other heads may be interleaved with these.
    static BFA_INLINE void prefetch_rows(const char* rows, int64_t row, int64_t bytes,
                                         int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n)
            for (int64_t x = 0; x < bytes; x += 64) __builtin_prefetch(rows + n * row + x, 0, 2);
    }
};

template <class Arithmetic>
class DecodeBlock {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    using State = SoftmaxRows<Arithmetic>;
    static constexpr int kLane = kLanes<Real>, kPair = Arithmetic::pair;
    static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

public:
    DecodeBlock(Arena& arena, const Decode& problem)
        : p_(problem),
          depth_(round_up(problem.head_dim, kPair * kLanes<Operand>) / kPair),
          columns_(columns(problem)),
          bias_(make_page_bias<Real>(arena, problem, int(block_rows(problem)))),
          choice_(arena, problem, int(block_rows(problem)), depth_),
          queries_(arena.take<Operand>(round_up(block_rows(problem), kRegisterRows) * depth_)),
          keys_(arena.take<Operand>(kTile * depth_)),
          keys_transposed_(arena.take<Operand>(depth_ * kTile)),
          values_(arena.take<Operand>(kTile / kPair * columns_)) {}

    static int64_t columns(const Decode& p) { return round_up(p.value_dim, kLane); }

    void begin(const RowBlock& block) {
        block_ = &block;
        for (int r = 0; r < block.rows; ++r)
            Arithmetic::pack_rows(p_.element, p_.q.at(block.b, block.head(r), block.query(r)), 0, 1,
                                  p_.head_dim, queries_ + r * depth_, depth_);
        const int64_t padded = round_up(block.rows, kRegisterRows);
        std::memset(queries_ + block.rows * depth_, 0,
                    (padded - block.rows) * depth_ * sizeof(Operand));
        bias_->begin_block(block);
    }

    // Returns the first of the near tiles, which are always computed.
    int64_t near_tile() const {
        const int64_t first =
            std::max<int64_t>(0, block_->first_position - constants::NEAR_KEYS + 1);
        const Range tiles = block_->tiles(p_);
        return std::clamp(first / p_.tile_keys(), tiles.begin, tiles.end);
    }

    // Adds the near tiles, writes the other tiles that cannot be skipped to `taken`, and returns
    // the number of these.
    int64_t add_near(const State& state, int32_t* taken) {
        const Range tiles = block_->tiles(p_), far = {tiles.begin, near_tile()};
        const bool choose = p_.tolerance > 0 && !far.empty();
        double longest = 0;
        for (int64_t tile = tiles.end - 1; tile >= far.end; --tile) {
            add_tile(state, tile);
            if (choose) longest = std::max(longest, longest_key(tile));
        }
        if (!choose) {
            for (int64_t tile = far.begin; tile < far.end; ++tile)
                taken[tile - far.begin] = int32_t(tile);
            return std::max<int64_t>(far.end - far.begin, 0);
        }
        choice_.begin_block(*block_, queries_, longest, [&](int r) { return state.lse(r); });
        return choice_.choose(*bias_, far, taken);
    }

    // Adds one tile to the softmax, and prefetches `next`.
    void add_tile(const State& state, int64_t tile, const Prefetch& next = {}) {
        const Range keys = keys_of(tile);
        const int n = int(keys.end - keys.begin), width = int(round_up(n, kLane * kPair));
        const PageSlot slot = slot_of(p_, block_->b, keys.begin);
        const bool masked = n < width || !block_->all_visible(p_, keys);
        const bool few = block_->rows <= kMaxDotRows;
        // In place, rows are paired again for every register block, which pays off for few rows.
        const bool in_place = !masked && reads_in_place(p_.value_dim) && (kPair == 1 || few);
        const Operand* rows[kTile];
        if (few) {
            find_keys(slot, n, rows);
        } else {
            pack_keys(slot, n, width);
        }
        const char* values = row_at(p_.v, slot, block_->kv_head);
        slack_ = in_place ? 0 : pack_values(values, n, width, next);
        for (int row = 0; row < block_->rows; row += kStripRows) {
            const int count = std::min(kStripRows, block_->rows - row);
            const int padded = int(round_up(count, kRegisterRows));
            alignas(64) Real logits[kStripRows * kTile];
            if (few) {
                Dots<Arithmetic>::all(count, n, depth_, queries_, rows, logits,
                                      [&](int j, int end) { next.prefetch_keys(j, end); });
            } else {
                gemm<Arithmetic, false>(padded, width, depth_, {queries_ + row * depth_, depth_, 1},
                                        {keys_transposed_, kTile}, {logits, kTile});
            }
            const State strip = state.from(row);
            const bool raises =
                masked ? finish_logits<true>(strip, row, count, keys, slot, width, logits)
                       : finish_logits<false>(strip, row, count, keys, slot, width, logits);
            if (raises) strip.raise_pivots(count, width, logits, slack_);
            strip.exponentiate(count, width, logits);
            const LeftMatrix<Operand> weights = {reinterpret_cast<Operand*>(logits), kTile, 1};
            const Result<Real> outputs = {strip.outputs, columns_};
            if (in_place) {
                const auto rows = rows_in_place<Arithmetic>(values, p_.v.row_stride, next.values);
                gemm<Arithmetic, true>(count, columns_, width / kPair, weights, rows, outputs);
            } else if (masked && !values_finite_) {
                gemm_visible<Arithmetic>(count, columns_, weights, packed_values(), outputs,
                                         [&](int r) { return block_->visible(p_, row + r, keys); });
            } else {
                gemm<Arithmetic, true>(count, columns_, width / kPair, weights, packed_values(),
                                       outputs);
            }
        }
    }

    Prefetch prefetch_of(int64_t tile) const {
        const PageSlot slot = slot_of(p_, block_->b, tile * p_.tile_keys());
        const int64_t bytes = element_bytes(p_.element);
        return {row_at(p_.k, slot, block_->kv_head),
                row_at(p_.v, slot, block_->kv_head),
                p_.k.row_stride,
                p_.v.row_stride,
                p_.head_dim * bytes,
                p_.value_dim * bytes};
    }

private:
    Range keys_of(int64_t tile) const {
        const int64_t begin = tile * p_.tile_keys();
        return {begin, std::min(begin + p_.tile_keys(), block_->last_position + 1)};
    }

    // Whether rows with this number of channels can be used as operands in place, without packing.
    bool reads_in_place(int64_t channels) const {
        return Arithmetic::reads_in_place(p_.element) && channels % (kPair * kLanes<Operand>) == 0;
    }

    void find_keys(const PageSlot& slot, int n, const Operand** rows) {
        const char* source = row_at(p_.k, slot, block_->kv_head);
        const bool in_place = reads_in_place(p_.head_dim);
        if (!in_place)
            Arithmetic::pack_rows(p_.element, source, p_.k.row_stride, n, p_.head_dim, keys_,
                                  depth_);
        for (int j = 0; j < n; ++j)
            rows[j] = in_place ? reinterpret_cast<const Operand*>(source + j * p_.k.row_stride)
                               : keys_ + j * depth_;
    }

    void pack_keys(const PageSlot& slot, int n, int width) {
        Arithmetic::pack_rows(p_.element, row_at(p_.k, slot, block_->kv_head), p_.k.row_stride, n,
                              p_.head_dim, keys_, depth_);
        std::memset(keys_ + n * depth_, 0, (width - n) * depth_ * sizeof(Operand));
        transpose(keys_, width, depth_, depth_, keys_transposed_);
    }

    // Packs n values, padded with zeros to `width`. Returns how far logits may exceed their pivot.
    Real pack_values(const char* source, int n, int width, const Prefetch& next) {
        constexpr int kAtOnce = 4;
        for (int j = 0; j < n; j += kAtOnce) {
            const int count = std::min(kAtOnce, n - j);
            next.prefetch_values(j, j + count);
            Arithmetic::pack_row_pairs(p_.element, source + j * p_.v.row_stride, p_.v.row_stride,
                                       count, p_.value_dim, values_ + j / kPair * columns_,
                                       columns_);
        }
        const int packed = int(round_up(n, kPair) / kPair);
        std::memset(values_ + packed * columns_, 0,
                    (width / kPair - packed) * columns_ * sizeof(Operand));
        const Real largest = Arithmetic::largest_magnitude(values_, width / kPair * columns_);
        values_finite_ = std::isfinite(largest);
        return State::slack(largest);
    }

    RightMatrix<Operand> packed_values() const { return {values_, columns_}; }

    // logits = scale * product + bias in base 2, -inf where masked. Returns whether some logit is
    // too large for the pivot of its row.
    template <bool kMasked>
    bool finish_logits(const State& state, int first_row, int count, Range keys,
                       const PageSlot& slot, int width, Real* logits) const {
        const Vector<Real> scale = broadcast(Real(p_.scale * kLog2e));
        Vector<Real> excess = broadcast(-kInfinity);
        alignas(64) Real bias[kTile] = {};
        for (int r = 0; r < count; ++r) {
            Vector<Real> largest = broadcast(-kInfinity);
            const Range visible =
                kMasked ? block_->visible(p_, first_row + r, keys) : Range{0, width};
            bias_->fill(first_row + r, keys, slot, visible, bias);
            for (int c = 0; c < width; c += kLane) {
                Real* logit = logits + r * kTile + c;
                Vector<Real> s = load(logit) * scale + load(bias + c);
                if (kMasked) s = where_visible<Real>(visible, c, s, broadcast(-kInfinity));
                store(logit, s);
                largest = max<Real>(s, largest);
            }
            excess = max<Real>(largest - (state.pivots[r] + slack_), excess);
        }
        return reduce_max<Real>(excess) > 0;
    }

    double longest_key(int64_t tile) {
        const Range keys = keys_of(tile);
        const Operand* rows[kTile];
        const int n = int(keys.end - keys.begin);
        find_keys(slot_of(p_, block_->b, keys.begin), n, rows);
        double longest = 0;
        for (int j = 0; j < n; ++j) {
            const double length = std::sqrt(length_squared<Arithmetic>(rows[j], depth_));
            if (!(length <= longest)) longest = length;  // propagates NaN
        }
        return longest;
    }

    const Decode& p_;
    const int64_t depth_, columns_;
    PageBias<Real>* const bias_;
    TileChoice<Arithmetic> choice_;
    Operand *queries_, *keys_, *keys_transposed_, *values_;

    const RowBlock* block_ = nullptr;
    bool values_finite_ = true;
    Real slack_ = 0;
};

}  // namespace bfa::BFA_KERNELS
