// The products of a block of queries and a tile of keys, once P and dS are known:
//   grad_v += P^T grad_o,  grad_k += dS^T q,  grad_q += dS k, the latter two not scaled.
#pragma once

#include "strip_gradients.h"

namespace bfa::BFA_KERNELS {

// The rows of the gradients for the queries of a block, and for the keys of a tile.
template <class Real>
struct RowGradients {
    Result<Real> queries, keys, values;
};

template <class Arithmetic, class Bias>
void add_products(Range queries, const HeadQueries<Arithmetic>& head,
                  const TileKeys<Arithmetic>& tile, const StripGradients<Arithmetic, Bias>& block,
                  const RowGradients<typename Arithmetic::Real>& gradients) {
    constexpr int kPair = Arithmetic::pair;
    const int rows = int(round_up(queries.end - queries.begin, kRegisterRows));
    gemm<Arithmetic, true>(tile.width(), tile.values().columns(), rows / kPair,
                           block.weights_per_key(), head.grad_outputs().right(queries.begin),
                           gradients.values);
    gemm<Arithmetic, true>(tile.width(), tile.keys().columns(), rows / kPair,
                           block.grad_logits_per_key(), head.queries().right(queries.begin),
                           gradients.keys);
    gemm<Arithmetic, true>(rows, tile.keys().columns(), tile.width() / kPair,
                           block.grad_logits_per_query(), tile.keys().right(0), gradients.queries);
}

// The same without the terms of masked pairs, for operands with infinities or NaN.
template <class Arithmetic, class Bias>
void add_visible_products(Range queries, const Visibility& visible,
                          const HeadQueries<Arithmetic>& head, const TileKeys<Arithmetic>& tile,
                          const StripGradients<Arithmetic, Bias>& block,
                          const RowGradients<typename Arithmetic::Real>& gradients) {
    const Range keys = tile.range();
    const int n_keys = int(keys.end - keys.begin), n_queries = int(queries.end - queries.begin);
    const auto visible_queries = [&](int key) {
        const int64_t j = keys.begin + key;
        return visible.queries({j, j + 1}).relative_to(queries.begin, n_queries);
    };
    const auto visible_keys = [&](int row) {
        return visible.keys(queries.begin + row).relative_to(keys.begin, n_keys);
    };
    gemm_visible<Arithmetic>(n_keys, tile.values().columns(), block.weights_per_key(),
                             head.grad_outputs().right(queries.begin), gradients.values,
                             visible_queries);
    gemm_visible<Arithmetic>(n_keys, tile.keys().columns(), block.grad_logits_per_key(),
                             head.queries().right(queries.begin), gradients.keys, visible_queries);
    gemm_visible<Arithmetic>(n_queries, tile.keys().columns(), block.grad_logits_per_query(),
                             tile.keys().right(0), gradients.queries, visible_keys);
}

}  // namespace bfa::BFA_KERNELS
