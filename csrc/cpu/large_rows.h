// The softmax of the rows of a head whose lse is so large that its rounding loses the logarithm of
// their sum, as where every visible key has a bias of -1e9 or of the lowest number.
#pragma once

#include "backward_operands.h"
#include "logit_block.h"
#include "online_softmax.h"

namespace bfa::BFA_KERNELS {

template <class Arithmetic, class Bias>
class LargeRows : LogitBlock<Arithmetic, Bias> {
    using Logits = LogitBlock<Arithmetic, Bias>;
    using Logits::problem_, Logits::visible_;
    using typename Logits::Real;

public:
    LargeRows(Arena& arena, const Problem& problem)
        : Logits(arena, problem, kStripRows),
          softmax_(SoftmaxRows<Arithmetic>::take(arena, kStripRows, 0)) {}

    // Replaces the lse of these rows by the pivot and the sum of their softmax.
    void resolve(const Problem& problem, int64_t b, int64_t h, HeadQueries<Arithmetic>& rows) {
        problem_ = problem;
        for (int64_t i = 0; i < problem.n_query; i += kStripRows) {
            const Range strip = {i, std::min(i + kStripRows, problem.n_query)};
            bool is_computed = false;
            for (int64_t query = strip.begin; query < strip.end; ++query) {
                if (!rows.is_large(query)) continue;
                if (!is_computed) add_keys(b, h, strip);
                is_computed = true;
                const int64_t r = query - strip.begin;
                rows.resolve(query, softmax_.pivots[r], Real(std::log2(softmax_.sum(r))));
            }
        }
    }

private:
    void add_keys(int64_t b, int64_t h, Range strip) {
        softmax_.clear(Logits::begin_block(b, h, strip));
        const Range keys = {visible_.keys(strip.begin).begin, visible_.keys(strip.end - 1).end};
        alignas(64) Real logits[kStripRows * kTile];
        for (int64_t n = keys.begin / kTile; n * kTile < keys.end; ++n) {
            const Range tile = Logits::tile(n);
            Logits::begin_tile(tile);
            const int width = Logits::template width<true>(strip, tile);
            Logits::template compute<true>(strip, tile, logits, [](int, const auto&) {});
            const int rows = Logits::template rows<true>(strip);
            softmax_.raise_pivots(rows, width, logits, 0);
            softmax_.exponentiate(rows, width, logits);
        }
    }

    SoftmaxRows<Arithmetic> softmax_;
};

}  // namespace bfa::BFA_KERNELS
