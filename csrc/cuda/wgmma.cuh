// Matrix products of a warp group, asynchronous: d += a b.
//
// d has 64 rows; thread t holds the elements of rows r and r + 8, r = 16 (t / 32) + t % 32 / 4, and
// of columns c and c + 1 of every 8 columns, c = 2 (t % 4). Of columns 8 g, 8 g + 1, ... these are
// d[4 g], d[4 g + 1] in row r, and d[4 g + 2], d[4 g + 3] in row r + 8. Fragments of a with 16
// columns have the same order, in pairs.
//
// An operand in shared memory consists of panels of 64 columns. A row of a panel has 128 bytes, and
// its chunks of 16 bytes are permuted as TMA does with a swizzle of 128 bytes.
#pragma once

#include "elements.cuh"
#include "ptx.cuh"

namespace bfa::cuda {

constexpr int kGroupThreads = 128;
constexpr int kPanel = 64;
constexpr int kRowBytes = 128;
constexpr int kDepth = 16;  // of one instruction

// Describes an operand that starts at row 0 of a group of 8 rows. panel_bytes: the distance of two
// panels; only products along the rows, whose panels are columns of d, read it.
__device__ inline uint64_t describe(const void* start, int panel_bytes = 0) {
    constexpr uint64_t swizzle_128 = 1ull << 62;
    constexpr uint64_t eight_rows = 8 * kRowBytes;
    const uint64_t address = shared_address(start);
    return (address & 0x3FFFF) >> 4 | uint64_t(panel_bytes >> 4) << 16 | eight_rows >> 4 << 32 |
           swizzle_128;
}

// The descriptor of the part of an operand `bytes` after the described one.
__device__ inline uint64_t advanced(uint64_t descriptor, int bytes) {
    return descriptor + (bytes >> 4);
}

// Marks registers as changed, so that the compiler moves no access to them across this place.
template <class T, int kCount>
__device__ void pin(T (&x)[kCount]) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
        if constexpr (kIsSame<T, float>)
            asm volatile("" : "+f"(x[n])::"memory");
        else
            asm volatile("" : "+r"(x[n])::"memory");
    }
}

// Precedes products that read or accumulate these registers.
template <class... Arrays>
__device__ void fence_products(Arrays&... registers) {
    (pin(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ inline void commit_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending committed groups are unfinished. These registers may then be used.
template <int kPending, class... Arrays>
__device__ void wait_products(Arrays&... registers) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
    (pin(registers), ...);
}

// Calls f(n, r, column) for each element n of the sums of a thread: row r of its two, and the
// column, counted from the thread's first one.
template <int kColumns, class Function>
__device__ void for_each_sum(Function f) {
#pragma unroll
    for (int n = 0; n < kColumns / 2; ++n) f(n, n / 2 % 2, n / 4 * 8 + n % 2);
}

// The rows of a thread and its first column, in the rows of all groups.
struct Place {
    int group, thread;

    __device__ int first_row_of_warp() const { return group * 64 + thread / 32 * 16; }
    __device__ int row(int r) const { return first_row_of_warp() + thread % 32 / 4 + 8 * r; }
    __device__ int column() const { return thread % 4 * 2; }
};

// Inline assembly names each register of the sums as an operand: %0, %1, ...
#define BFA_SUMS_8(n)                                                                           \
    "+f"(d[n]), "+f"(d[n + 1]), "+f"(d[n + 2]), "+f"(d[n + 3]), "+f"(d[n + 4]), "+f"(d[n + 5]), \
        "+f"(d[n + 6]), "+f"(d[n + 7])
#define BFA_SUMS_32(n) BFA_SUMS_8(n), BFA_SUMS_8(n + 8), BFA_SUMS_8(n + 16), BFA_SUMS_8(n + 24)
#define BFA_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define BFA_NAMES_32 BFA_NAMES_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define BFA_NAMES_64                                                                            \
    BFA_NAMES_32                                                                                \
    ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
    "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define BFA_WGMMA(SHAPE, NAMES, INPUTS, ADDS, TRANSPOSED, ...)                 \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " ADDS                      \
                 ", 0;\n"                                                      \
                 "wgmma.mma_async.sync.aligned." SHAPE " {" NAMES "}, " INPUTS \
                 ", p, 1, 1, " TRANSPOSED ";\n}"                               \
                 : __VA_ARGS__, "r"(static_cast<int>(adds)))

// The instructions for an element type.
template <class Element>
struct Wgmma;

#define BFA_WGMMA_OF(ELEMENT, TYPE)                                                              \
    template <>                                                                                  \
    struct Wgmma<ELEMENT> {                                                                      \
        static __device__ void rows_32(float* d, uint64_t a, uint64_t b, bool adds) {            \
            BFA_WGMMA("m64n32k16.f32." TYPE "." TYPE, BFA_NAMES_16, "%16, %17", "%18", "0, 0",   \
                      BFA_SUMS_8(0), BFA_SUMS_8(8) : "l"(a), "l"(b));                            \
        }                                                                                        \
        static __device__ void rows_64(float* d, uint64_t a, uint64_t b, bool adds) {            \
            BFA_WGMMA("m64n64k16.f32." TYPE "." TYPE, BFA_NAMES_32, "%32, %33", "%34", "0, 0",   \
                      BFA_SUMS_32(0) : "l"(a), "l"(b));                                          \
        }                                                                                        \
        static __device__ void both_32(float* d, uint64_t a, uint64_t b, bool adds) {            \
            BFA_WGMMA("m64n32k16.f32." TYPE "." TYPE, BFA_NAMES_16, "%16, %17", "%18", "1, 1",   \
                      BFA_SUMS_8(0), BFA_SUMS_8(8) : "l"(a), "l"(b));                            \
        }                                                                                        \
        static __device__ void both_64(float* d, uint64_t a, uint64_t b, bool adds) {            \
            BFA_WGMMA("m64n64k16.f32." TYPE "." TYPE, BFA_NAMES_32, "%32, %33", "%34", "1, 1",   \
                      BFA_SUMS_32(0) : "l"(a), "l"(b));                                          \
        }                                                                                        \
        static __device__ void rows_64(float* d, const uint32_t* a, uint64_t b, bool adds) {     \
            BFA_WGMMA("m64n64k16.f32." TYPE "." TYPE, BFA_NAMES_32, "{%32,%33,%34,%35}, %36",    \
                      "%37", "0", BFA_SUMS_32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),   \
                      "l"(b));                                                                   \
        }                                                                                        \
        static __device__ void rows_128(float* d, uint64_t a, uint64_t b, bool adds) {           \
            BFA_WGMMA("m64n128k16.f32." TYPE "." TYPE, BFA_NAMES_64, "%64, %65", "%66", "0, 0",  \
                      BFA_SUMS_32(0), BFA_SUMS_32(32) : "l"(a), "l"(b));                         \
        }                                                                                        \
        static __device__ void rows_128(float* d, const uint32_t* a, uint64_t b, bool adds) {    \
            BFA_WGMMA("m64n128k16.f32." TYPE "." TYPE, BFA_NAMES_64, "{%64,%65,%66,%67}, %68",   \
                      "%69", "0", BFA_SUMS_32(0), BFA_SUMS_32(32) : "r"(a[0]), "r"(a[1]),        \
                      "r"(a[2]), "r"(a[3]), "l"(b));                                             \
        }                                                                                        \
        static __device__ void columns_64(float* d, const uint32_t* a, uint64_t b, bool adds) {  \
            BFA_WGMMA("m64n64k16.f32." TYPE "." TYPE, BFA_NAMES_32, "{%32,%33,%34,%35}, %36",    \
                      "%37", "1", BFA_SUMS_32(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]),   \
                      "l"(b));                                                                   \
        }                                                                                        \
        static __device__ void columns_128(float* d, const uint32_t* a, uint64_t b, bool adds) { \
            BFA_WGMMA("m64n128k16.f32." TYPE "." TYPE, BFA_NAMES_64, "{%64,%65,%66,%67}, %68",   \
                      "%69", "1", BFA_SUMS_32(0), BFA_SUMS_32(32) : "r"(a[0]), "r"(a[1]),        \
                      "r"(a[2]), "r"(a[3]), "l"(b));                                             \
        }                                                                                        \
    }

BFA_WGMMA_OF(Bfloat16, "bf16");
BFA_WGMMA_OF(Float16, "f16");

#undef BFA_WGMMA_OF
#undef BFA_WGMMA
#undef BFA_NAMES_64
#undef BFA_NAMES_32
#undef BFA_NAMES_16
#undef BFA_SUMS_32
#undef BFA_SUMS_8

// Issues d = a b^T, or d += a b^T if `adds`, for 64 rows of a and kColumns rows of b, both in
// shared memory, where rows have kChannels channels. kRowsA, kRowsB: the rows of their panels.
// kFirst: the first of these channels that is multiplied.
template <class Element, int kColumns, int kChannels, int kRowsA, int kRowsB, int kFirst = 0>
__device__ void multiply_rows(float (&d)[kColumns / 2], uint64_t a, uint64_t b, bool adds = false) {
#pragma unroll
    for (int n = kFirst; n < kChannels; n += kDepth) {
        const int panel = n / kPanel, in_row = n % kPanel * 2;
        const uint64_t part_a = advanced(a, panel * kRowsA * kRowBytes + in_row);
        const uint64_t part_b = advanced(b, panel * kRowsB * kRowBytes + in_row);
        if constexpr (kColumns == 32)
            Wgmma<Element>::rows_32(d, part_a, part_b, adds || n > kFirst);
        else if constexpr (kColumns == 64)
            Wgmma<Element>::rows_64(d, part_a, part_b, adds || n > kFirst);
        else
            Wgmma<Element>::rows_128(d, part_a, part_b, adds || n > kFirst);
    }
}

// The same for fragments a of the first channels of 64 rows.
template <class Element, int kColumns, int kCount>
__device__ void multiply_rows(float (&d)[kColumns / 2], const uint32_t (&a)[kCount], uint64_t b,
                              bool adds = false) {
#pragma unroll
    for (int n = 0; n < 4 * kCount; n += kDepth) {
        const uint64_t part = advanced(b, n / kPanel * kColumns * kRowBytes + n % kPanel * 2);
        if constexpr (kColumns == 64)
            Wgmma<Element>::rows_64(d, a + n / 4, part, adds || n > 0);
        else
            Wgmma<Element>::rows_128(d, a + n / 4, part, adds || n > 0);
    }
}

// Issues d = a^T b for kRows rows of a and b in shared memory: 64 columns of a, and kColumns of b
// in a panel.
template <class Element, int kColumns, int kRows>
__device__ void multiply_transposed(float (&d)[kColumns / 2], uint64_t a, uint64_t b) {
#pragma unroll
    for (int n = 0; n < kRows; n += kDepth) {
        const uint64_t part_a = advanced(a, n * kRowBytes), part_b = advanced(b, n * kRowBytes);
        if constexpr (kColumns == 32)
            Wgmma<Element>::both_32(d, part_a, part_b, n > 0);
        else
            Wgmma<Element>::both_64(d, part_a, part_b, n > 0);
    }
}

// Issues d = a b, or d += a b if `adds`, for fragments a of 64 rows, and kRows rows of b in shared
// memory. describe(b) must contain the distance of panels.
template <class Element, int kColumns, int kRows>
__device__ void multiply_columns(float (&d)[kColumns / 2], const uint32_t (&a)[kRows / 4],
                                 uint64_t b, bool adds) {
    constexpr int kWidth = kColumns % 128 == 0 ? 128 : 64;
#pragma unroll
    for (int n = 0; n < kRows; n += kDepth) {
#pragma unroll
        for (int c = 0; c < kColumns; c += kWidth) {
            const int panel = c / kPanel * kRows * kRowBytes;
            const uint64_t part = advanced(b, panel + n * kRowBytes);
            const bool adds_part = adds || n > 0;
            if constexpr (kWidth == 64) {
                Wgmma<Element>::columns_64(d + c / 2, a + n / 4, part, adds_part);
            } else {
                Wgmma<Element>::columns_128(d + c / 2, a + n / 4, part, adds_part);
            }
        }
    }
}

}  // namespace bfa::cuda
