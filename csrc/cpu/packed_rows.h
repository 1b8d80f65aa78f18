// Rows of q, k or grad_o in the operand layouts for contracting their channels and their rows.
#pragma once

#include <cmath>

#include "gemm.h"
#include "workspace.h"

namespace bfa::BFA_KERNELS {

template <class Arithmetic>
class PackedRows {
    using Operand = typename Arithmetic::Operand;
    static constexpr int kPair = Arithmetic::pair;

public:
    // contracts_rows: whether the rows are operands of products that contract them.
    PackedRows(Arena& arena, int64_t rows, int64_t channels, bool contracts_rows = true)
        : contracts_rows_(contracts_rows),
          channels_(channels),
          columns_(round_up(channels, kLanes<typename Arithmetic::Real>)),
          row_stride_(kPair == 1 ? columns_ : depth()),
          pairs_(arena.take<Operand>(rows / kPair * columns_)),
          rows_(kPair == 1 ? pairs_ : arena.take<Operand>(rows * row_stride_)) {}

    // Packs `count` rows, then zeros up to row `padded`.
    void pack(Element element, const char* source, int64_t source_stride, int64_t count,
              int64_t padded) {
        if (kPair == 1 || contracts_rows_) {
            Arithmetic::pack_row_pairs(element, source, source_stride, count, channels_, pairs_,
                                       columns_);
            const int64_t packed = round_up(count, kPair) / kPair;
            std::memset(pairs_ + packed * columns_, 0,
                        (padded / kPair - packed) * columns_ * sizeof(Operand));
        }
        if (kPair == 1) return;
        Arithmetic::pack_rows(element, source, source_stride, count, channels_, rows_, row_stride_);
        std::memset(rows_ + count * row_stride_, 0,
                    (padded - count) * row_stride_ * sizeof(Operand));
    }

    int64_t depth() const { return round_up(channels_, kPair) / kPair; }
    int64_t columns() const { return columns_; }

    bool all_finite(int64_t rows) const {
        return std::isfinite(Arithmetic::largest_magnitude(pairs_, rows / kPair * columns_));
    }

    // For products that contract the channels.
    LeftMatrix<Operand> left(int64_t row) const {
        return {rows_ + row * row_stride_, row_stride_, 1};
    }
    void transpose_to(Operand* target, int rows) const {
        transpose(rows_, rows, depth(), row_stride_, target);
    }

    // For products that contract the rows. `row` is even.
    RightMatrix<Operand> right(int64_t row) const {
        return {pairs_ + row / kPair * columns_, columns_};
    }

private:
    const bool contracts_rows_;
    const int64_t channels_, columns_, row_stride_;
    Operand *pairs_, *rows_;
};

}  // namespace bfa::BFA_KERNELS
