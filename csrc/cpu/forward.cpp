// o_i = sum_j softmax_j(scale q_i.k_j + b_ij) v_j and lse_i = log sum_j exp(scale q_i.k_j + b_ij).
//
// A task is one block of queries of one head. It walks the key tiles from the diagonal to the past;
// each tile is packed once and used by every strip of queries. Invariant after each tile, per
// query: o = sum_j 2^(s_j - m) v_j, l = sum_j 2^(s_j - m), logits s in base 2. Of m only
// max_j s_j <= m + slack is asked, so that the tiles after the first seldom have to raise it.
#include <omp.h>

#include <cmath>

#include "../sequences.h"
#include "buffer.h"
#include "logit_block.h"
#include "schedule.h"
#include "select.h"
#include "subnormals.h"

namespace bfa::BFA_ISA {
namespace {

// Queries and outputs of a block share the second-level cache with the tile; the more rows, the
// less the packing of a tile weighs.
constexpr int64_t kBlockBytes = 512 << 10;
constexpr int64_t kCacheLine = 64;

// Weights up to 2^kSlack instead of 1 do no harm, unless values are so large that their weighted
// sums might overflow.
constexpr int kSlack = 8;
constexpr float kLargestWithSlack = 0x1p64f;

// As many as fit, but enough blocks that the last ones do not leave a thread waiting.
int64_t block_rows(const Problem& problem) {
    constexpr int64_t kBlocksPerThread = 8, kMinBlockRows = 48;
    const int64_t rows = problem.heads * query_count(problem);
    const int64_t fitting =
        kBlockBytes / ((problem.head_dim + problem.value_dim) * int64_t(sizeof(float)));
    const int64_t fair = std::max(kMinBlockRows, rows / (problem.threads * kBlocksPerThread));
    return std::min(round_up(std::min(fitting, fair), kStripRows),
                    round_up(problem.n_query, kRegisterRows));
}

template <class Arithmetic, class Bias>
class ForwardBlock : LogitBlock<Arithmetic, Bias> {
    using Logits = LogitBlock<Arithmetic, Bias>;
    using Logits::b_, Logits::block_, Logits::h_, Logits::kInfinity, Logits::kLane,
        Logits::problem_, Logits::kv_head_, Logits::visible_, Logits::width_;
    using typename Logits::Operand;
    using typename Logits::Real;

public:
    ForwardBlock(Arena& arena, const Forward& problem)
        : Logits(arena, problem, block_rows(problem)),
          whole_(problem),
          p_(problem),
          columns_(round_up(problem.value_dim, kLane)),
          values_(arena.take<Operand>(kTile / Arithmetic::pair * columns_)),
          output_(arena.take<Real>(block_rows(problem) * columns_)),
          pivots_(arena.take<Real>(block_rows(problem))),
          sums_(arena.take<Real>(block_rows(problem) * kLane)) {}

    void run(int64_t b, int64_t h, Range queries) {
        if (whole_.sequences) problem_ = p_ = of_sequence(whole_, b);
        const int64_t rows = Logits::begin_block(b, h, queries);
        std::memset(output_, 0, rows * columns_ * sizeof(Real));
        std::memset(sums_, 0, rows * kLane * sizeof(Real));
        std::fill(pivots_, pivots_ + rows, -kInfinity);
        const Range keys = {visible_.keys(queries.begin).begin, visible_.keys(queries.end - 1).end};
        if (!keys.empty()) {
            for (int64_t tile = (keys.end - 1) / kTile; tile >= keys.begin / kTile; --tile)
                add_tile(Logits::tile(tile));
        }
        finish();
    }

private:
    void add_tile(Range keys) {
        Logits::begin_tile(keys);
        const int n = int(keys.end - keys.begin);
        const char* values = p_.v.at(b_, kv_head_, keys.begin);
        Arithmetic::pack_row_pairs(p_.element, values, p_.v.row, n, p_.value_dim, values_,
                                   columns_);
        const int packed = round_up(n, Arithmetic::pair) / Arithmetic::pair;
        std::memset(values_ + packed * columns_, 0,
                    (width_ / Arithmetic::pair - packed) * columns_ * sizeof(Operand));
        const Real largest =
            Arithmetic::largest_magnitude(values_, width_ / Arithmetic::pair * columns_);
        values_finite_ = std::isfinite(largest);
        slack_ = largest < kLargestWithSlack ? kSlack : 0;

        for (int64_t row = 0; row < block_.end - block_.begin; row += kStripRows) {
            const Range strip = Logits::strip(row);
            prefetch_next_tile(keys.begin, row / kStripRows);
            switch (coverage(visible_, strip, keys)) {
                case Coverage::none: break;
                case Coverage::partial: add_strip<true>(strip, keys); break;
                case Coverage::full: add_strip<false>(strip, keys); break;
            }
        }
    }

    // While a strip is computed, some rows arrive of the tile that is packed next.
    void prefetch_next_tile(int64_t tile_begin, int64_t strip) const {
        constexpr int64_t kRowsPerStrip = 4;
        const auto ask_for = [](const char* row, int64_t bytes) {
            for (int64_t x = 0; x < bytes; x += kCacheLine) __builtin_prefetch(row + x);
        };
        const int64_t begin = tile_begin - kTile + strip * kRowsPerStrip;
        for (int64_t j = std::max<int64_t>(begin, 0);
             j < std::min(begin + kRowsPerStrip, tile_begin); ++j) {
            ask_for(p_.k.at(b_, kv_head_, j), p_.head_dim * element_bytes(p_.element));
            ask_for(p_.v.at(b_, kv_head_, j), p_.value_dim * element_bytes(p_.element));
        }
    }

    // One tile's share of a strip: logits, online softmax, weighted values.
    template <bool kMasked>
    void add_strip(Range strip, Range keys) {
        const int64_t row = strip.begin - block_.begin;
        const int rows = Logits::template rows<kMasked>(strip);
        const int width = Logits::template width<kMasked>(strip, keys);
        alignas(64) Real logits[kStripRows * kTile];
        Vector<Real> excess = broadcast(-kInfinity);
        const Real* pivots = pivots_ + row;
        Logits::template compute<kMasked>(strip, keys, logits, [&](int r, Vector<Real> largest) {
            excess = max<Real>(largest - (pivots[r] + slack_), excess);
        });
        if (reduce_max<Real>(excess) > 0) raise_pivots(row, rows, width, logits);
        // each row's weights replace its logits
        Operand* weights = reinterpret_cast<Operand*>(logits);
        for (int r = 0; r < rows; ++r)
            exponentials(width, logits + r * kTile, pivots_[row + r], weights + r * kTile,
                         sums_ + (row + r) * kLane);

        const LeftMatrix<Operand> left = {weights, kTile, 1};
        const Result<Real> output = {output_ + row * columns_, columns_};
        if (kMasked && !values_finite_) {
            gemm_visible<Arithmetic>(
                int(strip.end - strip.begin), columns_, left, {values_, columns_}, output,
                [&](int r) {
                    return visible_.keys(strip.begin + r).shifted_into(keys.begin, width);
                });
        } else {
            gemm<Arithmetic, true>(rows, columns_, width / Arithmetic::pair, left,
                                   {values_, columns_}, output);
        }
    }

    // m = max_j s_j in the rows where m + slack is less; their o and l shrink by
    // 2^(old m - new m).
    __attribute__((noinline)) void raise_pivots(int64_t row, int rows, int width,
                                                const Real* logits) {
        for (int r = 0; r < rows; ++r) {
            Vector<Real> largest_of_lane = broadcast(-kInfinity);
            for (int c = 0; c < width; c += kLane)
                largest_of_lane = max<Real>(load(logits + r * kTile + c), largest_of_lane);
            const Real largest = reduce_max<Real>(largest_of_lane);
            Real& pivot = pivots_[row + r];
            if (!(largest > pivot + slack_)) continue;
            const Real shrink = exp2(broadcast(pivot - largest))[0];
            pivot = largest;
            Real* output = output_ + (row + r) * columns_;
            for (int64_t c = 0; c < columns_; c += kLane)
                store(output + c, load(output + c) * shrink);
            Real* sum = sums_ + (row + r) * kLane;
            store(sum, load(sum) * shrink);
        }
    }

    // weights = 2^(logits - pivot), added up in `sum`; the two may share memory. While there is no
    // pivot all logits are -inf, and all weights 0.
    static BFA_INLINE void exponentials(int width, const Real* logits, Real pivot, Operand* weights,
                                        Real* sum) {
        if (pivot == -kInfinity) pivot = 0;
        Vector<Real> total{};
        if constexpr (Arithmetic::pair == 1) {
#pragma GCC unroll 4
            for (int c = 0; c < width; c += kLane) {
                const Vector<Real> weight = exp2(load(logits + c) - pivot);
                total += weight;
                store(weights + c, weight);
            }
        } else {
#pragma GCC unroll 2
            for (int c = 0; c < width; c += 2 * kLane) {
                const Vector<Real> first = exp2<true>(load(logits + c) - pivot);
                const Vector<Real> second = exp2<true>(load(logits + c + kLane) - pivot);
                total += first + second;
                store(weights + c / 2, Arithmetic::pairs_along_row(first, second));
            }
        }
        store(sum, load(sum) + total);
    }

    void finish() {
        for (int64_t query = block_.begin; query < block_.end; ++query) {
            const int64_t row = query - block_.begin;
            Real* output = output_ + row * columns_;
            const Real sum = reduce_sum<Real>(load(sums_ + row * kLane));
            if (sum == 0) std::memset(output, 0, p_.value_dim * sizeof(Real));
            write_row(p_.element, output, sum == 0 ? Real(0) : 1 / sum, p_.value_dim,
                      p_.o.at(b_, h_, query));
            const double lse = (double(pivots_[row]) + std::log2(double(sum))) * kLn2;
            p_.lse.at<Real>(b_, h_)[query] = sum == 0 ? -kInfinity : Real(lse);
        }
    }

    const Forward& whole_;
    Forward p_;  // of the sequence at hand, as problem_ is
    const int64_t columns_;
    Operand* values_;
    Real *output_, *pivots_, *sums_;

    bool values_finite_;
    Real slack_;
};

// The blocks of queries of all sequences and heads.
class Blocks {
public:
    Blocks(const Forward& problem, int64_t rows)
        : problem_(problem), rows_(rows), count_(count()), order_(count_) {
        Task* task = order_.data();
        for (int64_t b = 0; b < problem.batch; ++b) {
            const Forward sequence = of_sequence(problem, b);
            Visibility visible(sequence);
            for (int64_t block = blocks(sequence.n_query) - 1; block >= 0; --block)
                for (int64_t h = 0; h < problem.heads; ++h) {
                    visible.begin_head(b, h);
                    *task++ = {visible.pairs(queries(block, sequence.n_query)),
                               (block * problem.batch + b) * problem.heads + h};
                }
        }
        longest_first(order_.data(), count_);
    }

    int64_t size() const { return count_; }

    // Calls function(b, h, queries) for the block at `place` in the order of their cost.
    template <class Function>
    void take(int64_t place, Function function) const {
        const int64_t id = order_.data()[place].id, sequence = id / problem_.heads;
        const int64_t b = sequence % problem_.batch, n_query = rows_of(problem_, b).n_query;
        function(b, id % problem_.heads, queries(sequence / problem_.batch, n_query));
    }

private:
    int64_t blocks(int64_t n_query) const { return (n_query + rows_ - 1) / rows_; }
    Range queries(int64_t block, int64_t n_query) const {
        return {block * rows_, std::min((block + 1) * rows_, n_query)};
    }
    int64_t count() const {
        int64_t sum = 0;
        for (int64_t b = 0; b < problem_.batch; ++b)
            sum += blocks(rows_of(problem_, b).n_query) * problem_.heads;
        return sum;
    }

    const Forward& problem_;
    const int64_t rows_, count_;
    const Buffer<Task> order_;
};

template <class Arithmetic, class Bias>
void run_forward(const Forward& problem) {
    using Block = ForwardBlock<Arithmetic, Bias>;
    const Blocks blocks(problem, block_rows(problem));
    const int threads = int(std::min<int64_t>(problem.threads, blocks.size()));
    const ThreadWorkspaces<Block, Forward> workspaces(problem, threads);
#pragma omp parallel num_threads(threads)
    {
        [[maybe_unused]] const FlushSubnormals flush_subnormals;
        Block block = workspaces.of_thread(omp_get_thread_num());
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t place = 0; place < blocks.size(); ++place)
            blocks.take(place,
                        [&](int64_t b, int64_t h, Range queries) { block.run(b, h, queries); });
    }
}

}  // namespace

void forward(const Forward& problem) {
    if (query_count(problem) == 0) return;
    select_kernel(problem, [&](auto arithmetic, auto bias) {
        run_forward<typename decltype(arithmetic)::type, typename decltype(bias)::type>(problem);
    });
}

}  // namespace bfa::BFA_ISA
