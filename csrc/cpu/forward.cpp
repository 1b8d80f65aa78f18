// o_i = sum_j softmax_j(scale q_i.k_j + b_ij) v_j and lse_i = log sum_j exp(scale q_i.k_j + b_ij).
//
// A task is one block of queries of one head. It iterates over the key tiles from the diagonal to
// the past; each tile is packed once and used by every strip of queries.
#include <omp.h>

#include <cmath>

#include "../sequences.h"
#include "buffer.h"
#include "logit_block.h"
#include "online_softmax.h"
#include "schedule.h"
#include "select_form.h"
#include "subnormals.h"

namespace bfa::BFA_KERNELS {
namespace {

// Bytes of queries and outputs per block, which share the L2 cache with a tile. Large blocks
// amortize the packing of a tile.
constexpr int64_t kBlockBytes = 512 << 10;
constexpr int64_t kCacheLine = 64;

// Returns the rows of a block: as many as fit in kBlockBytes, but few enough to balance the load.
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
          softmax_(SoftmaxRows<Arithmetic>::take(arena, block_rows(problem), columns_)) {}

    void run(int64_t b, int64_t h, Range queries) {
        if (whole_.sequences) problem_ = p_ = sequence_problem(whole_, b);
        softmax_.clear(Logits::begin_block(b, h, queries));
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
        Arithmetic::pack_row_pairs(p_.element, values, p_.v.row_stride, n, p_.value_dim, values_,
                                   columns_);
        const int packed = round_up(n, Arithmetic::pair) / Arithmetic::pair;
        std::memset(values_ + packed * columns_, 0,
                    (width_ / Arithmetic::pair - packed) * columns_ * sizeof(Operand));
        const Real largest =
            Arithmetic::largest_magnitude(values_, width_ / Arithmetic::pair * columns_);
        values_finite_ = std::isfinite(largest);
        slack_ = SoftmaxRows<Arithmetic>::slack(largest);

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

    // Prefetches, while a strip is computed, some rows of the tile that is packed next.
    void prefetch_next_tile(int64_t tile_begin, int64_t strip) const {
        constexpr int64_t kRowsPerStrip = 4;
        const auto prefetch_rows = [](const char* row, int64_t bytes) {
            for (int64_t x = 0; x < bytes; x += kCacheLine) __builtin_prefetch(row + x);
        };
        const int64_t begin = tile_begin - kTile + strip * kRowsPerStrip;
        for (int64_t j = std::max<int64_t>(begin, 0);
             j < std::min(begin + kRowsPerStrip, tile_begin); ++j) {
            prefetch_rows(p_.k.at(b_, kv_head_, j), p_.head_dim * element_bytes(p_.element));
            prefetch_rows(p_.v.at(b_, kv_head_, j), p_.value_dim * element_bytes(p_.element));
        }
    }

    // Adds a tile to a strip: logits, online softmax, weighted values.
    template <bool kMasked>
    void add_strip(Range strip, Range keys) {
        const int64_t row = strip.begin - block_.begin;
        const int rows = Logits::template rows<kMasked>(strip);
        const int width = Logits::template width<kMasked>(strip, keys);
        alignas(64) Real logits[kStripRows * kTile];
        Vector<Real> excess = broadcast(-kInfinity);
        const SoftmaxRows<Arithmetic> softmax = softmax_.from(row);
        Logits::template compute<kMasked>(strip, keys, logits, [&](int r, Vector<Real> largest) {
            excess = max<Real>(largest - (softmax.pivots[r] + slack_), excess);
        });
        if (reduce_max<Real>(excess) > 0) softmax.raise_pivots(rows, width, logits, slack_);
        softmax.exponentiate(rows, width, logits);

        const LeftMatrix<Operand> left = {reinterpret_cast<Operand*>(logits), kTile, 1};
        const Result<Real> output = {softmax.outputs, columns_};
        if (kMasked && !values_finite_) {
            gemm_visible<Arithmetic>(
                int(strip.end - strip.begin), columns_, left, {values_, columns_}, output,
                [&](int r) {
                    return visible_.keys(strip.begin + r).relative_to(keys.begin, width);
                });
        } else {
            gemm<Arithmetic, true>(rows, columns_, width / Arithmetic::pair, left,
                                   {values_, columns_}, output);
        }
    }

    void finish() {
        for (int64_t query = block_.begin; query < block_.end; ++query) {
            const int64_t row = query - block_.begin;
            softmax_.write_output(row, p_.element, p_.value_dim, p_.o.at(b_, h_, query));
            p_.lse.at<Real>(b_, h_)[query] = Real(softmax_.lse(row));
            p_.pivot.at<Real>(b_, h_)[query] = softmax_.pivots[row];
            p_.log_sum.at<Real>(b_, h_)[query] = Real(softmax_.log_sum(row));
        }
    }

    const Forward& whole_;
    Forward p_;  // the problem of the current sequence, like problem_
    const int64_t columns_;
    Operand* values_;
    SoftmaxRows<Arithmetic> softmax_;

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
            const Forward sequence = sequence_problem(problem, b);
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

    // Calls function(b, h, queries) for block number `index` in the order of decreasing cost.
    template <class Function>
    void take(int64_t index, Function function) const {
        const int64_t id = order_.data()[index].id, sequence = id / problem_.heads;
        const int64_t b = sequence % problem_.batch, n_query = sequence_at(problem_, b).n_query;
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
            sum += blocks(sequence_at(problem_, b).n_query) * problem_.heads;
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
        Block block = workspaces.make(omp_get_thread_num());
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t index = 0; index < blocks.size(); ++index)
            blocks.take(index,
                        [&](int64_t b, int64_t h, Range queries) { block.run(b, h, queries); });
    }
}

}  // namespace

void forward(const Forward& problem) {
    if (query_count(problem) == 0) return;
    select_tile_bias<BFA_ARITHMETIC>(problem, [&](auto bias) {
        run_forward<BFA_ARITHMETIC, typename decltype(bias)::type>(problem);
    });
}

}  // namespace bfa::BFA_KERNELS
