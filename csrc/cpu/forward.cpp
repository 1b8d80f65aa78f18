// o_i = sum_j softmax_j(scale q_i.k_j + b_ij) v_j and lse_i = log sum_j exp(scale q_i.k_j + b_ij).
//
// A task is one block of queries of one head. It walks the key tiles from the diagonal to the past; each
// tile is packed once and used by every strip of six queries. Invariant after each tile, per query:
// o = sum_j 2^(s_j - m) v_j, l = sum_j 2^(s_j - m), m = max_j s_j, logits s in base 2.
#include <omp.h>

#include <cmath>
#include <limits>

#include "gemm.h"
#include "select.h"

namespace bfa::BFA_ISA {
namespace {

constexpr int64_t kMaxBlockRows = 384;  // packing a tile costs 1-2 % of using it on so many rows

// Enough blocks that the last ones do not leave a thread waiting.
int64_t block_rows(const Problem& problem) {
    constexpr int64_t kBlocksPerThread = 4, kMinBlockRows = 48;
    const int64_t rows = problem.batch * problem.heads * problem.n_query;
    const int64_t fair = std::clamp(rows / (problem.threads * kBlocksPerThread), kMinBlockRows, kMaxBlockRows);
    return round_up(std::min(fair, problem.n_query), kStripRows);
}

template <class Arithmetic, class Bias>
class ForwardBlock {
    using Real = typename Arithmetic::Real;
    using Operand = typename Arithmetic::Operand;
    static constexpr int kLane = kLanes<Real>;
    static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

public:
    ForwardBlock(Arena& arena, const Forward& problem)
        : p_(problem),
          rows_(block_rows(problem)),
          depth_(round_up(problem.head_dim, Arithmetic::pair) / Arithmetic::pair),
          columns_(round_up(problem.value_dim, kLane)),
          bias_(arena, problem, false),
          queries_(arena.take<Operand>(rows_ * depth_)),
          keys_(arena.take<Operand>(kTile * depth_)),
          keys_transposed_(arena.take<Operand>(depth_ * kTile)),
          values_(arena.take<Operand>(kTile / Arithmetic::pair * columns_)),
          output_(arena.take<Real>(rows_ * columns_)),
          maxima_(arena.take<Real>(rows_)),
          sums_(arena.take<Real>(rows_ * kLane)) {}

    void run(int64_t b, int64_t h, Range queries) {
        begin(b, h, queries);
        const Range keys = {visible_keys(p_, queries.begin).begin, visible_keys(p_, queries.end - 1).end};
        if (!keys.empty()) {
            for (int64_t tile = (keys.end - 1) / kTile; tile >= keys.begin / kTile; --tile)
                add_tile({tile * kTile, std::min((tile + 1) * kTile, p_.n_key)});
        }
        finish();
    }

private:
    void begin(int64_t b, int64_t h, Range queries) {
        b_ = b, h_ = h, kv_head_ = h / (p_.heads / p_.kv_heads), block_ = queries;
        const int64_t count = queries.end - queries.begin;
        const int64_t padded = round_up(count, kStripRows);
        Arithmetic::pack_rows(p_.element, p_.q.at(b, h, queries.begin), p_.q.row, count, p_.head_dim, queries_,
                              depth_);
        std::memset(queries_ + count * depth_, 0, (padded - count) * depth_ * sizeof(Operand));
        std::memset(output_, 0, padded * columns_ * sizeof(Real));
        std::memset(sums_, 0, padded * kLane * sizeof(Real));
        std::fill(maxima_, maxima_ + padded, -kInfinity);
        bias_.begin_head(b, h);
    }

    void add_tile(Range keys) {
        const int n = int(keys.end - keys.begin);
        width_ = int(round_up(n, kLane * Arithmetic::pair));
        Arithmetic::pack_rows(p_.element, p_.k.at(b_, kv_head_, keys.begin), p_.k.row, n, p_.head_dim, keys_, depth_);
        std::memset(keys_ + n * depth_, 0, (width_ - n) * depth_ * sizeof(Operand));
        transpose(keys_, width_, depth_, depth_, keys_transposed_);
        const char* values = p_.v.at(b_, kv_head_, keys.begin);
        Arithmetic::pack_row_pairs(p_.element, values, p_.v.row, n, p_.value_dim, values_, columns_);
        const int packed = round_up(n, Arithmetic::pair) / Arithmetic::pair;
        std::memset(values_ + packed * columns_, 0,
                    (width_ / Arithmetic::pair - packed) * columns_ * sizeof(Operand));
        values_finite_ = true;
        for (int r = 0; r < n; ++r)
            values_finite_ &= all_finite<Real>(p_.element, values + r * p_.v.row, p_.value_dim);

        bias_.begin_tile(keys);
        for (int64_t row = 0; row < block_.end - block_.begin; row += kStripRows) {
            const int64_t query = block_.begin + row;
            const Range strip = {query, std::min(query + kStripRows, block_.end)};
            switch (coverage(p_, strip, keys, width_)) {
                case Coverage::none: break;
                case Coverage::partial: add_strip<true>(strip, keys); break;
                case Coverage::full: add_strip<false>(strip, keys); break;
            }
        }
    }

    // One tile's share of six queries: logits, online softmax, weighted values.
    template <bool kMasked>
    void add_strip(Range strip, Range keys) {
        const int64_t row = strip.begin - block_.begin;
        alignas(64) Real logits[kStripRows * kTile];
        gemm<Arithmetic, false>(kStripRows, width_, depth_, {queries_ + row * depth_, depth_, 1},
                                {keys_transposed_, kTile}, {logits, kTile});
        alignas(64) Real rescale[round_up(kStripRows, kLane)];
        const bool rescaled = add_bias_and_raise_maxima<kMasked>(strip, keys, logits, rescale);
        if (rescaled) rescale_strip(row, rescale);

        alignas(64) Operand weights[kStripRows * kTile / Arithmetic::pair];
        for (int r = 0; r < kStripRows; ++r) exponentials(row + r, logits + r * kTile, weights + r * kWeightStride);
        const Result<Real> output = {output_ + row * columns_, columns_};
        if (kMasked && !values_finite_) {
            gemm_visible<Arithmetic>(int(strip.end - strip.begin), columns_, {weights, kWeightStride, 1},
                                     {values_, columns_}, output, [&](int r) {
                                         return visible_keys(p_, strip.begin + r).shifted_into(keys.begin, width_);
                                     });
        } else {
            gemm<Arithmetic, true>(kStripRows, columns_, width_ / Arithmetic::pair, {weights, kWeightStride, 1},
                                   {values_, columns_}, output);
        }
    }

    // logits = scale * product + bias in base 2, -inf where masked; fills rescale with 2^(old m - new m)
    // and says whether any of them differs from 1.
    template <bool kMasked>
    BFA_INLINE bool add_bias_and_raise_maxima(Range strip, Range keys, Real* logits, Real* rescale) {
        const Vector<Real> scale = broadcast(Real(p_.scale * kLog2e));
        Real* maxima = maxima_ + (strip.begin - block_.begin);
        for (int r = 0; r < kStripRows; ++r) {
            const int64_t query = std::min(strip.begin + r, strip.end - 1);
            const auto bias = bias_.row(query);
            const Range visible = visible_keys(p_, query).shifted_into(keys.begin, kTile);
            Vector<Real> largest = broadcast(-kInfinity);
#pragma GCC unroll 4
            for (int c = 0; c < width_; c += kLane) {
                Vector<Real> s = load(logits + r * kTile + c) * scale + bias.logits(c);
                if (kMasked) s = where_visible<Real>(visible, c, s, broadcast(-kInfinity));
                store(logits + r * kTile + c, s);
                largest = max<Real>(s, largest);
            }
            const Real raised = std::max(maxima[r], reduce_max<Real>(largest));
            rescale[r] = raised == maxima[r] ? Real(0) : maxima[r] - raised;
            maxima[r] = raised;
        }
        bool rescaled = false;
        for (int r = 0; r < kStripRows; ++r) rescaled |= rescale[r] != 0;
        if (rescaled)
            for (int r = 0; r < kStripRows; r += kLane) store(rescale + r, exp2(load(rescale + r)));
        return rescaled;
    }

    void rescale_strip(int64_t row, const Real* rescale) {
        for (int r = 0; r < kStripRows; ++r) {
            Real* output = output_ + (row + r) * columns_;
            for (int64_t c = 0; c < columns_; c += kLane) store(output + c, load(output + c) * rescale[r]);
            Real* sum = sums_ + (row + r) * kLane;
            store(sum, load(sum) * rescale[r]);
        }
    }

    static constexpr int kWeightStride = kTile / Arithmetic::pair;

    // weights = 2^(logits - m), their sum added to l
    BFA_INLINE void exponentials(int64_t row, const Real* logits, Operand* weights) {
        // A row with nothing but -inf so far keeps m = -inf; any finite pivot gives it weights of 0.
        const Vector<Real> pivot = broadcast(maxima_[row] == -kInfinity ? Real(0) : maxima_[row]);
        Vector<Real> sum = load(sums_ + row * kLane);
        if constexpr (Arithmetic::pair == 1) {
#pragma GCC unroll 4
            for (int c = 0; c < width_; c += kLane) {
                const Vector<Real> weight = exp2(load(logits + c) - pivot);
                sum += weight;
                store(weights + c, weight);
            }
        } else {
#pragma GCC unroll 2
            for (int c = 0; c < width_; c += 2 * kLane) {
                const Vector<Real> first = exp2<true>(load(logits + c) - pivot);
                const Vector<Real> second = exp2<true>(load(logits + c + kLane) - pivot);
                sum += first + second;
                store(weights + c / 2, Arithmetic::pairs_along_row(first, second));
            }
        }
        store(sums_ + row * kLane, sum);
    }

    void finish() {
        for (int64_t query = block_.begin; query < block_.end; ++query) {
            const int64_t row = query - block_.begin;
            Real* output = output_ + row * columns_;
            const Real sum = reduce_sum<Real>(load(sums_ + row * kLane));
            if (sum == 0) std::memset(output, 0, p_.value_dim * sizeof(Real));
            write_row(p_.element, output, sum == 0 ? Real(0) : 1 / sum, p_.value_dim, p_.o.at(b_, h_, query));
            const double lse = (double(maxima_[row]) + std::log2(double(sum))) * kLn2;
            p_.lse.at<Real>(b_, h_)[query] = sum == 0 ? -kInfinity : Real(lse);
        }
    }

    const Forward& p_;
    const int64_t rows_, depth_, columns_;
    Bias bias_;
    Operand *queries_, *keys_, *keys_transposed_, *values_;
    Real *output_, *maxima_, *sums_;

    int64_t b_, h_, kv_head_;
    Range block_;
    int width_;
    bool values_finite_;
};

template <class Arithmetic, class Bias>
void run_forward(const Forward& problem) {
    using Block = ForwardBlock<Arithmetic, Bias>;
    const int64_t rows = block_rows(problem);
    const int64_t blocks = (problem.n_query + rows - 1) / rows;
    const int64_t heads = problem.batch * problem.heads;
    const int threads = int(std::min<int64_t>(problem.threads, blocks * heads));
    const ThreadWorkspaces<Block, Forward> workspaces(problem, threads);
#pragma omp parallel num_threads(threads)
    {
        Block block = workspaces.of_thread(omp_get_thread_num());
        // the last queries see most keys: longest first
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < blocks * heads; ++task) {
            const int64_t begin = (blocks - 1 - task / heads) * rows, head = task % heads;
            block.run(head / problem.heads, head % problem.heads, {begin, std::min(begin + rows, problem.n_query)});
        }
    }
}

}  // namespace

void forward(const Forward& problem) {
    select_kernel(problem, [&](auto arithmetic, auto bias) {
        run_forward<typename decltype(arithmetic)::type, typename decltype(bias)::type>(problem);
    });
}

}  // namespace bfa::BFA_ISA
