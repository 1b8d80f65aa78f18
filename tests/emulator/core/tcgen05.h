// Shared by the instructions on tensor memory.
#pragma once

#include "accesses.h"
#include "tensor_memory.h"

namespace ptx {

// An address in tensor memory.
struct TensorAddress {
    uint32_t lane, column;

    explicit TensorAddress(uint64_t bits)
        : lane(static_cast<uint32_t>(bits >> 16 & 0xFFFF)),
          column(static_cast<uint32_t>(bits & 0xFFFF)) {}
};

void require_allocated(const Warp& w, int lane, uint32_t column, uint32_t columns);

Execute decode_tensor_product(Modifiers& m, Instruction& i);
Execute decode_tensor_commit(Modifiers& m, Instruction& i);
Execute decode_tensor_load(Modifiers& m, Instruction& i);
Execute decode_tensor_store(Modifiers& m, Instruction& i);
Next wait_for_tensor_loads(Warp& w, const Instruction& i);
Next wait_for_tensor_stores(Warp& w, const Instruction& i);

}  // namespace ptx
