// o_i = sum_j softmax_j(scale q_i.k_j + b_ij) v_j and lse_i = log sum_j exp(scale q_i.k_j + b_ij).
//
// A task is one block of queries of one head. It walks the key tiles from the diagonal to the past;
// each tile is packed once and used by every strip of queries.
#include <omp.h>

#include <cmath>

#include "buffer.h"
#include "logit_block.h"
#include "online_softmax.h"
#include "schedule.h"
#include "select.h"
#include "subnormals.h"

namespace bfa::BFA_ISA {
namespace {

// Queries and outputs of a block share the second-level cache with the tile; the more rows, the
// less the packing of a tile weighs.
constexpr int64_t kBlockBytes = 512 << 10;
constexpr int64_t kCacheLine = 64;

// As many as fit, but enough blocks that the last ones do not leave a thread waiting.
int64_t block_rows(const Problem& problem) {
    constexpr int64_t kBlocksPerThread = 8, kMinBlockRows = 48;
    const int64_t rows = problem.batch * problem.heads * problem.n_query;
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
        Logits::kv_head_, Logits::visible_, Logits::width_;
    using typename Logits::Operand;
    using typename Logits::Real;

public:
    ForwardBlock(Arena& arena, const Forward& problem)
        : Logits(arena, problem, block_rows(problem)),
          p_(problem),
          columns_(round_up(problem.value_dim, kLane)),
          values_(arena.take<Operand>(kTile / Arithmetic::pair * columns_)),
          softmax_(SoftmaxRows<Arithmetic>::take(arena, block_rows(problem), columns_)) {}

    void run(int64_t b, int64_t h, Range queries) {
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
        Arithmetic::pack_row_pairs(p_.element, values, p_.v.row, n, p_.value_dim, values_,
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
                    return visible_.keys(strip.begin + r).shifted_into(keys.begin, width);
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
        }
    }

    const Forward& p_;
    const int64_t columns_;
    Operand* values_;
    SoftmaxRows<Arithmetic> softmax_;

    bool values_finite_;
    Real slack_;
};

template <class Arithmetic, class Bias>
void run_forward(const Forward& problem) {
    using Block = ForwardBlock<Arithmetic, Bias>;
    const int64_t rows = block_rows(problem);
    const int64_t blocks = (problem.n_query + rows - 1) / rows;
    const int64_t heads = problem.batch * problem.heads;
    const int threads = int(std::min<int64_t>(problem.threads, blocks * heads));
    const ThreadWorkspaces<Block, Forward> workspaces(problem, threads);
    const auto head_of = [&](int64_t task) { return task % heads; };
    const auto queries_of = [&](int64_t task) {
        const int64_t begin = (blocks - 1 - task / heads) * rows;
        return Range{begin, std::min(begin + rows, problem.n_query)};
    };
    const Buffer<Task> tasks(blocks * heads);
    Visibility visible(problem);
    for (int64_t task = 0; task < blocks * heads; ++task) {
        visible.begin_head(head_of(task) / problem.heads, head_of(task) % problem.heads);
        tasks.data()[task] = {visible.pairs(queries_of(task)), task};
    }
    longest_first(tasks.data(), blocks * heads);
#pragma omp parallel num_threads(threads)
    {
        [[maybe_unused]] const FlushSubnormals flush_subnormals;
        Block block = workspaces.of_thread(omp_get_thread_num());
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t place = 0; place < blocks * heads; ++place) {
            const int64_t task = tasks.data()[place].id, head = head_of(task);
            block.run(head / problem.heads, head % problem.heads, queries_of(task));
        }
    }
}

}  // namespace

void forward(const Forward& problem) {
    if (problem.batch == 0 || problem.n_query == 0) return;
    select_kernel(problem, [&](auto arithmetic, auto bias) {
        run_forward<typename decltype(arithmetic)::type, typename decltype(bias)::type>(problem);
    });
}

}  // namespace bfa::BFA_ISA
