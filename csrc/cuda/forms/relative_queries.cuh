// The relative bias for the queries of a warp.
//
// The warp multiplies the vectors of its 16 queries and those of all distances of a tile:
//
//     E[r, y] = U_r . P[15 + p_0 - j_0 - y],   b of row r and column c = E[r, c + 15 - r]
//
// with the position p_0 of its first query, and the first key j_0. The sums of E are in the same
// lanes as those of rows in wgmma.cuh, but row r is to be shifted by 15 - r: within the four lanes
// that share a row, with a carry to the next eight columns. Only three tiles of eight columns of E
// are needed at a time.
#pragma once

#include "forms/relative.cuh"
#include "tiles.cuh"

namespace bfa::cuda {

template <int kRank, class Element>
class WarpQueries<forms::Relative<kRank>, Element> {
    using Form = forms::Relative<kRank>;

public:
    static constexpr bool kExists = true;

    __device__ WarpQueries(const Block& block, Place place) : bias_(block.bias) {
        const Head& head = block.head;
        const int first_row = place.row(0) - place.thread % 32 / 4;
        first_column_ = Form::column(block, head.position(block.first + first_row));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = block.first + place.row(r);
            const bool exists = i < head.n_query;
            const auto* vector = block.bias.query_vectors.template at<const uint16_t>(
                head.b, head.h, head.first_query + i);
            const auto* pairs = reinterpret_cast<const uint32_t*>(vector);
#pragma unroll
            for (int n = 0; n < kRank / 8; ++n)
                vectors_[n / 2][n % 2 * 2 + r] = exists ? pairs[4 * n + place.thread % 4] : 0;
        }
    }

    // Whether the bias of these queries may differ from 0 for keys j, j + 1, ...
    template <int kKeys>
    __device__ bool may_differ(int j) const {
        const int first = first_column_ - (j + kKeys - 1);
        return __any_sync(~0u, Form::may_differ(bias_, first, kRows + kKeys - 1));
    }

    // Replaces s by scale s + b.
    template <int kKeys>
    __device__ void add(float (&s)[kKeys / 2], float scale, const float* numbers) const {
        const Shear shear;
        const uint32_t address = shared_address(numbers) + shear.offset;
        float products[kKeys / 8 + 2][4];
#pragma unroll
        for (int n = 0; n < kKeys / 8 + 2; n += 2) {
            multiply<kKeys>(products[n], products[n + 1], address, 8 * n);
            shear.exchange(products[n]);
            shear.exchange(products[n + 1]);
            if (n == 0) continue;
#pragma unroll
            for (int m = n - 2; m < n; ++m) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float &first = s[4 * m + e], &second = s[4 * m + 2 + e];
                    first =
                        first * scale + shear.shifted(e, products[m + 1][e], products[m + 2][e]);
                    second = second * scale +
                             shear.shifted(e, products[m][2 + e], products[m + 1][2 + e]);
                }
            }
        }
    }

    // Adds dS P to the gradients of these queries' vectors. dS is shifted like the products, in
    // the other direction and by even numbers, in pairs that are rounded before: for rows that are
    // shifted by odd numbers, the vectors of the next distances are multiplied instead.
    template <int kKeys>
    __device__ void add_gradient(const float (&grad_s)[kKeys / 2], const float* numbers) {
        const Unshear unshear;
        const uint32_t first = shared_address(numbers);
        const auto pair = [&](int n, int r) {  // of eight keys
            const float* x = grad_s + 4 * n + 2 * r;
            return n < 0 || n >= kKeys / 8 ? 0 : Element::pair(x[0], x[1]);
        };
#pragma unroll
        for (int n = 0; n < kKeys / 8 + 2; n += 2) {
            uint32_t of_even[4], of_odd[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const int r = m % 2, tile = n + m / 2 - (r == 0);
                const uint32_t x = unshear.shifted(pair(tile - 1, r), pair(tile, r));
                of_even[m] = kSums == 1 && unshear.is_odd ? 0 : x;
                of_odd[m] = kSums > 1 || unshear.is_odd ? x : 0;
            }
            const uint32_t next = n == kKeys / 8 ? unshear.next_last : unshear.next;
            add_products<kKeys>(gradient_[0], of_even, first + unshear.offset, 8 * n);
            add_products<kKeys>(gradient_[kSums - 1], of_odd, first + next, 8 * n);
        }
    }
    // Writes them for `count` queries of the block. gradient: those of its first one.
    __device__ void store_gradient(float* gradient, int64_t row, Place place, int count) const {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            if (place.row(r) >= count) continue;
            auto* to = reinterpret_cast<float2*>(gradient + place.row(r) * row + place.column());
#pragma unroll
            for (int n = 0; n < kRank / 8; ++n) {
                const auto& even = gradient_[0][n];
                const auto& odd = gradient_[kSums - 1][n];
                to[4 * n] = place.thread / 4 % 2 ? float2{even[2 * r], even[2 * r + 1]}
                                                 : float2{odd[2 * r], odd[2 * r + 1]};
            }
        }
    }

private:
    static constexpr int kRows = 16;
    // Sums of gradients. If there are two, those of rows that are shifted by odd numbers are in the
    // second one, and the others of either are not used; else there are too few registers.
    static constexpr int kSums = kRank <= 32 ? 2 : 1;

    // The bytes before the vector of the largest distance of the warp of a thread.
    static __device__ uint32_t offset_of_warp(uint32_t thread) {
        const uint32_t first_row = (thread - kGroupThreads) / 32 * kRows;
        return Form::template offset<1>(kPlanQueries - kRows - first_row, 0);
    }

    // How a lane takes part in shifting rows.
    struct Shear {
        uint32_t offset;
        bool is_odd, carries[2];
        uint32_t source[2];

        __device__ Shear() {
            const uint32_t thread = thread_again(), lane = thread % 32;
            const uint32_t q = lane % 4, shift = 7 - lane / 4;
            offset = offset_of_warp(thread) + Form::offset_of_lane(lane);
            is_odd = shift % 2;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                carries[e] = q < (shift + e) / 2;
                source[e] = lane - q + (q + (shift + e) / 2) % 4;
            }
        }
        // Rows that are shifted by an odd number exchange columns 2 q and 2 q + 1.
        __device__ void exchange(float (&x)[4]) const {
#pragma unroll
            for (int n = 0; n < 4; n += 2) {
                const float even = x[n], odd = x[n + 1];
                x[n] = is_odd ? odd : even;
                x[n + 1] = is_odd ? even : odd;
            }
        }
        // The product that belongs to this lane's column of a parity. A lane has products of two
        // groups of eight columns, of which its only reader needs one.
        __device__ float shifted(int parity, float own, float next) const {
            return __shfl_sync(~0u, carries[parity] ? next : own, source[parity]);
        }
    };

    // The reverse, of pairs of columns.
    struct Unshear {
        uint32_t offset;
        uint32_t next;       // the same for the next vector of each row
        uint32_t next_last;  // of the last 16 rows: the last one has no next one, and no dS
        bool is_odd, carries;
        uint32_t source;

        __device__ Unshear() {
            const uint32_t thread = thread_again(), lane = thread % 32;
            const uint32_t q = lane % 4, shift = 7 - lane / 4, row = lane % kRows;
            const uint32_t first = offset_of_warp(thread), chunk = lane / kRows;
            offset = first + Form::template offset<1>(row, chunk);
            next = first + Form::template offset<1>(row + 1, chunk);
            next_last = row + 1 < kRows ? next : offset;
            is_odd = shift % 2;
            carries = q + shift / 2 >= 4;
            source = lane - q + (q + 4 - shift / 2) % 4;
        }
        __device__ uint32_t shifted(uint32_t previous, uint32_t own) const {
            return __shfl_sync(~0u, carries ? previous : own, source);
        }
    };

    // The products with distances y, ..., y + 15.
    template <int kKeys>
    __device__ void multiply(float (&low)[4], float (&high)[4], uint32_t address, int y) const {
#pragma unroll
        for (int n = 0; n < 4; ++n) low[n] = high[n] = 0;
#pragma unroll
        for (int k = 0; k < kRank / 16; ++k) {
            const auto& a = vectors_[k];
            uint32_t b[4];
            load_matrices(b, address + Form::template offset<kPlanQueries + kKeys>(y, 2 * k));
            multiply_add<Element>(low, a[0], a[1], a[2], a[3], b[0], b[1]);
            multiply_add<Element>(high, a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }

    // Adds the products with the vectors of distances y, ..., y + 15.
    template <int kKeys>
    static __device__ void add_products(float (&sums)[kRank / 8][4], const uint32_t (&a)[4],
                                        uint32_t address, int y) {
#pragma unroll
        for (int k = 0; k < kRank / 16; ++k) {
            uint32_t b[4];
            load_matrices<true>(b, address + Form::template offset<kPlanQueries + kKeys>(y, 2 * k));
            multiply_add<Element>(sums[2 * k], a[0], a[1], a[2], a[3], b[0], b[1]);
            multiply_add<Element>(sums[2 * k + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
    }

    const Bias& bias_;
    int first_column_;                 // of the distance of its first query to key 0
    uint32_t vectors_[kRank / 16][4];  // fragments of the left operand
    float gradient_[kSums][kRank / 8][4] = {};
};

}  // namespace bfa::cuda
