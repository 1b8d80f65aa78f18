// Shortens the key ranges of a plan by keys of negligible softmax mass: tiles are removed from the
// far end of a range while, for every query i, the sum of exp(s_ij - near_i) over all removed keys
// is at most `fraction`.
//
// A task is one block of queries of one head. Invariant: sums_ holds, for each query, the sum of
// exp(s_ij - near_i) over the keys computed so far. The cut of a plan tile is final once a query of
// the tile would exceed `fraction`.
#include <omp.h>

#include <cmath>

#include "logit_block.h"
#include "select_form.h"
#include "subnormals.h"

namespace bfa::BFA_KERNELS {
namespace {

constexpr int64_t kPlanTiles = 3;  // plan tiles per block
constexpr int64_t kBlockRows = kPlanTiles * constants::PLAN_QUERIES;
static_assert(kBlockRows % kStripRows == 0);

template <class Arithmetic, class Bias>
class TrimBlock : LogitBlock<Arithmetic, Bias> {
    using Logits = LogitBlock<Arithmetic, Bias>;
    using Logits::block_, Logits::kLane, Logits::visible_;
    using typename Logits::Real;

public:
    TrimBlock(Arena& arena, const Trim& problem)
        : Logits(arena, problem, kBlockRows),
          p_(problem),
          pivots_(arena.take<Real>(kBlockRows)),
          sums_(arena.take<Real>(kBlockRows * kLane)) {}

    void run(int64_t b, int64_t h, Range queries) {
        const int64_t rows = Logits::begin_block(b, h, queries);
        const Real* near = p_.near.template at<Real>(b, h, queries.begin);
        for (int64_t r = 0; r < rows; ++r)
            pivots_[r] = in_base_2<Real>(near[std::min(r, queries.end - queries.begin - 1)]);
        std::memset(sums_, 0, rows * kLane * sizeof(Real));
        int32_t* cuts = p_.cut.template at<int32_t>(b, h, queries.begin / constants::PLAN_QUERIES);
        bool active[kPlanTiles] = {};
        std::fill(active,
                  active + (queries.end - queries.begin + constants::PLAN_QUERIES - 1) /
                               constants::PLAN_QUERIES,
                  true);

        const Range first = visible_.keys(queries.begin), last = visible_.keys(queries.end - 1);
        int64_t tile = p_.from_end ? (last.end - 1) / kTile : first.begin / kTile;
        while (any(active) && tile * kTile >= first.begin / kTile * kTile &&
               tile * kTile < last.end) {
            const Range keys = Logits::tile(tile);
            for (int64_t t = 0; t < kPlanTiles; ++t) active[t] &= is_removable(plan_tile(t), keys);
            if (!any(active)) break;
            add_tile(keys, active);
            for (int64_t t = 0; t < kPlanTiles; ++t)
                if (active[t] &= within_fraction(plan_tile(t))) move_cut(cuts[t], keys);
            tile += p_.from_end ? -1 : 1;
        }
    }

private:
    static bool any(const bool (&active)[kPlanTiles]) {
        return std::find(active, active + kPlanTiles, true) != active + kPlanTiles;
    }

    // The rows of plan tile t in the block.
    Range plan_tile(int64_t t) const {
        return {t * constants::PLAN_QUERIES,
                std::min((t + 1) * constants::PLAN_QUERIES, block_.end - block_.begin)};
    }

    // Whether all of these keys may be removed from the ranges of the queries.
    bool is_removable(Range rows, Range keys) const {
        if (p_.from_end) return keys.begin > p_.position(block_.begin + rows.end - 1);
        return keys.end <= p_.position(block_.begin + rows.begin) - p_.reach + 1;
    }

    void move_cut(int32_t& cut, Range keys) const {
        cut = p_.from_end ? std::min(cut, int32_t(keys.begin)) : std::max(cut, int32_t(keys.end));
    }

    void add_tile(Range keys, const bool (&active)[kPlanTiles]) {
        Logits::begin_tile(keys);
        for (int64_t row = 0; row < block_.end - block_.begin; row += kStripRows) {
            const Range strip = Logits::strip(row);
            const int64_t last = strip.end - 1 - block_.begin;
            if (!active[row / constants::PLAN_QUERIES] && !active[last / constants::PLAN_QUERIES])
                continue;
            switch (coverage(visible_, strip, keys)) {
                case Coverage::none: break;
                case Coverage::partial: add_strip<true>(strip, keys); break;
                case Coverage::full: add_strip<false>(strip, keys); break;
            }
        }
    }

    template <bool kMasked>
    void add_strip(Range strip, Range keys) {
        const int64_t row = strip.begin - block_.begin;
        const int width = Logits::template width<kMasked>(strip, keys);
        alignas(64) Real logits[kStripRows * kTile];
        Logits::template compute<kMasked>(strip, keys, logits, [&](int r, const auto&) {
            const Vector<Real> pivot = broadcast(pivots_[row + r]);
            Vector<Real> sum = load(sums_ + (row + r) * kLane);
            for (int c = 0; c < width; c += kLane)
                sum += exp2<Arithmetic::approximate_exp2>(load(logits + r * kTile + c) - pivot);
            store(sums_ + (row + r) * kLane, sum);
        });
    }

    // Whether the sums of all rows are at most `fraction`; false if a logit or `near` is NaN.
    bool within_fraction(Range rows) const {
        for (int64_t r = rows.begin; r < rows.end; ++r)
            if (!(reduce_sum<Real>(load(sums_ + r * kLane)) <= Real(p_.fraction))) return false;
        return true;
    }

    const Trim& p_;
    Real *pivots_, *sums_;
};

template <class Arithmetic, class Bias>
void run_trim(const Trim& problem) {
    using Block = TrimBlock<Arithmetic, Bias>;
    const int64_t blocks = (problem.n_query + kBlockRows - 1) / kBlockRows;
    const int64_t tasks = problem.batch * problem.heads * blocks;
    const int threads = int(std::min<int64_t>(problem.threads, tasks));
    const ThreadWorkspaces<Block, Trim> workspaces(problem, threads);
#pragma omp parallel num_threads(threads)
    {
        [[maybe_unused]] const FlushSubnormals flush_subnormals;
        Block block = workspaces.make(omp_get_thread_num());
        // The last queries of a head have the most keys.
#pragma omp for schedule(monotonic : dynamic, 1)
        for (int64_t task = tasks - 1; task >= 0; --task) {
            const int64_t head = task % (problem.batch * problem.heads);
            const int64_t begin = task / (problem.batch * problem.heads) * kBlockRows;
            block.run(head / problem.heads, head % problem.heads,
                      {begin, std::min(begin + kBlockRows, problem.n_query)});
        }
    }
}

}  // namespace

void trim(const Trim& problem) {
    if (problem.batch == 0 || problem.n_query == 0 || problem.n_key == 0) return;
    select_tile_bias<BFA_ARITHMETIC>(problem, [&](auto bias) {
        run_trim<BFA_ARITHMETIC, typename decltype(bias)::type>(problem);
    });
}

}  // namespace bfa::BFA_KERNELS
