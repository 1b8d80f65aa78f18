// Matrix products of a warp, synchronous: d += a b, for 16 rows of a and 8 columns of b.
//
// Fragments of d and a have the order of wgmma.cuh: lane 4 g + q has rows g and g + 8. Of the 16
// rows of b it has rows 2 q, 2 q + 1 and 2 q + 8, 2 q + 9 of column g, in pairs.
#pragma once

#include "elements.cuh"
#include "ptx.cuh"

namespace bfa::cuda {

// Loads four 8 x 8 matrices, of whose rows of 16 bytes lanes 8 n, 8 n + 1, ... have the addresses.
// Of each matrix, lane 4 g + q receives the elements 2 q and 2 q + 1 of row g or, if transposed, of
// column g.
template <bool kTransposed = false>
__device__ void load_matrices(uint32_t (&x)[4], uint32_t address) {
    if constexpr (kTransposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(address)
                     : "memory");
    }
}

// Loads columns `column`, ..., `column` + 15 of a warp's 16 rows of a panel, of which `row` is the
// first, as fragments of a left operand in the order of wgmma.cuh.
template <class Element, int kRows>
__device__ void load_fragment(uint32_t (&x)[4], const Element (&panel)[kRows][64], int row,
                              int column, int lane) {
    const int of_lane = row + lane % 16, chunk = column / 8 + lane / 16;
    load_matrices(x, shared_address(&panel[of_lane][(chunk ^ of_lane % 8) * 8]));
}

// The same for 4 kCount columns, which may be in several panels.
template <class Element, int kPanels, int kRows, int kCount>
__device__ void load_fragments(uint32_t (&x)[kCount], const Element (&panels)[kPanels][kRows][64],
                               int row, int lane) {
#pragma unroll
    for (int n = 0; n < kCount; n += 4) {
        uint32_t fragment[4];
        load_fragment(fragment, panels[n / 16], row, n * 4 % 64, lane);
#pragma unroll
        for (int m = 0; m < 4; ++m) x[n + m] = fragment[m];
    }
}

// Stores the fragments of a warp's 16 rows of a panel, of which `row` is the first.
template <class Element, int kRows>
__device__ void store_fragments(Element (&panel)[kRows][64], const uint32_t (&x)[16], int row,
                                int lane) {
    const int of_lane = row + lane % 16;
    // Of chunk 0 or 1. The address of another pair differs in bits that rows do not use.
    const uint32_t first = shared_address(&panel[of_lane][(lane / 16 ^ of_lane % 8) * 8]);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         first ^ n * 32),
                     "r"(x[4 * n]), "r"(x[4 * n + 1]), "r"(x[4 * n + 2]), "r"(x[4 * n + 3])
                     : "memory");
    }
}

#define BFA_MMA(TYPE)                                                                   \
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                 \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))

template <class Element>
__device__ void multiply_add(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                             uint32_t b0, uint32_t b1) {
    if constexpr (kIsSame<Element, Bfloat16>)
        BFA_MMA("bf16");
    else
        BFA_MMA("f16");
}

#undef BFA_MMA

// Copies 16 bytes to shared memory or, unless `exists`, writes as many zeros.
__device__ inline void copy_chunk(void* to, const void* from, bool exists) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(exists ? 16 : 0)
                 : "memory");
}

// Waits for all copies of this thread.
__device__ inline void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace bfa::cuda
