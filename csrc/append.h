// Appends new tokens to a paged cache.
#pragma once

#include <cstring>

#include "problem.h"

namespace bfa {

// The `tokens` rows of sequence b are written to its keys lengths[b] - tokens ... lengths[b] - 1.
// rows is (batch, heads, tokens, channels); pages is (pages, heads, page_size, channels).
// decode_problem.h describes the block table.
struct Append {
    int64_t batch, heads, tokens, row_bytes;
    int64_t page_size, columns;
    const int64_t* lengths;
    const int32_t* block_table;
    View rows, pages;
};

inline void append_rows(const Append& p) {
    for (int64_t b = 0; b < p.batch; ++b)
        for (int64_t n = 0; n < p.tokens; ++n) {
            const int64_t key = p.lengths[b] - p.tokens + n;
            const int64_t column = key / p.page_size % p.columns;
            const int64_t page = p.block_table[b * p.columns + column];
            for (int64_t h = 0; h < p.heads; ++h)
                std::memcpy(p.pages.at<char>(page, h, key % p.page_size), p.rows.at<char>(b, h, n),
                            p.row_bytes);
        }
}

}  // namespace bfa
