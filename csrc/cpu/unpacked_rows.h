// Right operands of a matrix product that are read in place.
#pragma once

#include "gemm.h"

namespace bfa::BFA_KERNELS {

#if defined(__AVX512BF16__)
// Pairs of bfloat16 rows as rows of operands. Unpacking permutes the columns: of every eight
// columns, one vector has the first four and the next vector the others; order() undoes the
// permutation in the accumulators. The rows at `later` are prefetched one at a time in between,
// because many simultaneous prefetches would stall.
struct RowPairs {
    static constexpr int kVectors = 2;
    const uint16_t* data;
    int64_t stride;
    const uint16_t* later;

    RowPairs from_column(int64_t column) const { return {data + column, stride, later + column}; }

    template <int kCount>
    BFA_INLINE void read(int64_t k, Vector<uint32_t> (&columns)[kCount]) const {
        const uint16_t *upper = data + 2 * k * stride, *lower = upper + stride;
        const uint16_t* ahead = later + 2 * k * stride;
#pragma GCC unroll 2
        for (int x = 0; x < kCount; x += 2) {
            const int64_t column = x * kLanes<uint32_t>;
            __builtin_prefetch(ahead + column, 0, 2);
            __builtin_prefetch(ahead + stride + column, 0, 2);
            const __m512i first = _mm512_loadu_si512(upper + column),
                          second = _mm512_loadu_si512(lower + column);
            columns[x] = (Vector<uint32_t>)_mm512_unpacklo_epi16(first, second);
            columns[x + 1] = (Vector<uint32_t>)_mm512_unpackhi_epi16(first, second);
        }
    }

    template <int kCount>
    static BFA_INLINE void order(Vector<float> (&sums)[kCount]) {
        const __m512i front =
                          _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0),
                      back = _mm512_add_epi32(front, _mm512_set1_epi32(8));
#pragma GCC unroll 2
        for (int x = 0; x < kCount; x += 2) {
            const __m512 firsts = (__m512)sums[x], others = (__m512)sums[x + 1];
            sums[x] = (Vector<float>)_mm512_permutex2var_ps(firsts, front, others);
            sums[x + 1] = (Vector<float>)_mm512_permutex2var_ps(firsts, back, others);
        }
    }
};
#endif

// Returns the right operand of a gemm for rows of elements in place. `later`: rows of the same
// layout to prefetch, or null.
template <class Arithmetic>
auto rows_in_place(const char* source, int64_t row_bytes, [[maybe_unused]] const char* later) {
    using Operand = typename Arithmetic::Operand;
#if defined(__AVX512BF16__)
    if constexpr (Arithmetic::pair == 2)
        return RowPairs{reinterpret_cast<const uint16_t*>(source), row_bytes / 2,
                        reinterpret_cast<const uint16_t*>(later ? later : source)};
    else
#endif
        return RightMatrix<Operand>{reinterpret_cast<const Operand*>(source),
                                    row_bytes / int64_t(sizeof(Operand))};
}

}  // namespace bfa::BFA_KERNELS
