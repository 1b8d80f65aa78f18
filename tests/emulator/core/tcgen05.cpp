// tcgen05: allocation of tensor memory, and decoding of the other instructions.
#include "tcgen05.h"

#include <bit>

namespace ptx {

void require_allocated(const Warp& w, int lane, uint32_t column, uint32_t columns) {
    if (w.block.tensor_memory.is_allocated(column, columns)) return;
    w.fault(kind::kOutOfBounds,
            "columns " + std::to_string(column) + " to " + std::to_string(column + columns - 1) +
                " of tensor memory are not within one allocation",
            lane);
}

namespace {

uint32_t column_count(const Warp& w, const Operand& o) {
    const auto columns = w.uniform<uint32_t>(o);
    if (columns < 32 || columns > TensorMemory::kColumns || !std::has_single_bit(columns)) {
        w.fault(kind::kInvalid,
                "tensor memory is allocated in powers of two from 32 to 512 columns");
    }
    return columns;
}

Next allocate(Warp& w, const Instruction& i) {
    TensorMemory& memory = w.block.tensor_memory;
    if (!memory.may_allocate) {
        w.fault(kind::kInvalid, "the block has relinquished its permit to allocate tensor memory");
    }
    const uint32_t columns = column_count(w, i[1]);
    const auto first =
        memory.allocate(columns, w.block.cluster.static_agents(), w.block.cluster.launch.random);
    if (!first) {
        w.fault(kind::kDeadlock,
                std::to_string(columns) + " columns of tensor memory are not free");
    }
    const int lane = w.first_lane();
    const uint64_t address = w.addresses(i[0])[lane];
    uint8_t bytes[4];
    std::memcpy(bytes, &*first, sizeof bytes);
    require_aligned(w, lane, address, sizeof bytes);
    // The specification does not name the proxy. Triton later copies to this address without a
    // fence, which requires the asynchronous one.
    Access access = access_of(w, lane);
    access.is_async = true;
    write_shared(w, lane, address, sizeof bytes, bytes, access);
    return Next::kFollowing;
}

Next release(Warp& w, const Instruction& i) {
    const TensorAddress address(w.uniform<uint32_t>(i[0]));
    const uint32_t columns = column_count(w, i[1]);
    require_allocated(w, -1, address.column, columns);
    const Access access = access_of(w, Access::kWholeWarp);
    w.require(w.block.tensor_memory.write({address.column, columns, 0xFF}, access), -1, 0);
    if (!w.block.tensor_memory.release(address.column, columns)) {
        w.fault(kind::kInvalid, "the freed columns are not one allocation");
    }
    return Next::kFollowing;
}

Next relinquish(Warp& w, const Instruction&) {
    w.block.tensor_memory.may_allocate = false;
    return Next::kFollowing;
}

// The emulator orders accesses by barriers and waits; these fences have no further effect.
Next nothing(Warp&, const Instruction&) { return Next::kFollowing; }

Execute decode_tcgen05(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    const std::string operation = m.pop_front();
    m.take("cta_group::1");
    if (operation == "mma") return decode_tensor_product(m, i);
    if (operation == "commit") return decode_tensor_commit(m, i);
    if (operation.starts_with("fence::")) return nothing;
    i.is_aligned = m.take("sync") && m.take("aligned");
    m.take("shared::cta");
    if (operation == "wait::ld") return wait_for_tensor_loads;
    if (operation == "wait::st") return wait_for_tensor_stores;
    if (operation == "relinquish_alloc_permit") return relinquish;
    m.take("b32");
    if (operation == "alloc") return allocate;
    if (operation == "dealloc") return release;
    if (operation == "ld") return decode_tensor_load(m, i);
    if (operation == "st") return decode_tensor_store(m, i);
    return nullptr;
}

}  // namespace

void add_tcgen05(Decoders& all) { all["tcgen05"] = decode_tcgen05; }

}  // namespace ptx
