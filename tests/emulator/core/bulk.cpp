#include "bulk.h"

#include <algorithm>

namespace ptx {

namespace {

constexpr int64_t kMaxTransactions = (1 << 20) - 1;

}  // namespace

Signal signal_at(Warp& w, int lane, uint64_t address) {
    MBarrier& barrier = mbarrier_at(w, lane, address);
    Block& owner = w.block.cluster.block_of(w, address, lane);
    const auto time = static_cast<uint32_t>(barrier.phase + 1);
    owner.incoming[barrier.agent] = {time, &w, w.pc()};
    return {&owner, &barrier, time};
}

Access access_of(const Warp& w, const Signal& signal) {
    Access access{&w.known, {signal.barrier->agent, signal.time}};
    access.is_async = true;
    access.line = access_of(w, Access::kWholeWarp).line;
    return access;
}

void land(Warp& w, const Signal& signal, uint32_t bytes, std::function<void()> move) {
    const auto complete = [&w, signal, bytes, pc = w.pc(), move = std::move(move)] {
        MBarrier& barrier = *signal.barrier;
        if (barrier.phase + 1 != signal.time) {
            w.fault_at(
                pc, kind::kInFlight,
                "the phase of the mbarrier ended before the copy did: it did not expect all bytes");
        }
        move();
        barrier.in_flight -= 1;
        if (barrier.transactions - bytes < -kMaxTransactions) {
            w.fault_at(pc, kind::kInvalid, "more bytes arrive at an mbarrier than it can count");
        }
        signal.block->add_transactions(barrier, -static_cast<int64_t>(bytes));
    };
    signal.barrier->in_flight += 1;
    if (w.block.cluster.launch.lands_early()) {
        complete();
    } else {
        signal.block->copies.push_back({signal.barrier->agent, signal.time, complete});
    }
}

uint8_t* begin_shared_write(Warp& w, int lane, uint64_t address, uint32_t size,
                            const Access& access) {
    const uint32_t offset = shared_offset(w, lane, address, size);
    SharedMemory& shared = w.block.cluster.block_of(w, address, lane).shared;
    w.require(shared.write(offset, size, access, nullptr), lane, address);
    return shared.data() + offset;
}

void land_in_groups(Warp& w, int lane, uint64_t address, uint32_t size,
                    std::function<std::vector<uint8_t>(const uint8_t*)> gather,
                    std::function<void(const std::vector<uint8_t>&)> scatter) {
    Block& block = w.block;
    if (address >> kRankShift != block.rank) {
        w.fault(kind::kInvalid, "bulk copies to global memory read the block's own shared memory",
                lane, address);
    }
    const uint32_t time = ++w.bulk_time, reads = block.agent_of_bulk(w.index);
    Access access = access_of(w, lane);
    access.epoch = {reads, time};
    access.is_async = true;
    const uint32_t offset = shared_offset(w, lane, address, size);
    w.require(block.shared.read(offset, size, access), lane, address);
    w.bulk_copies.push_back({time, lane, w.pc()});
    w.unwritten.push_back(w.bulk_copies.back());

    const auto write = [scatter = std::move(scatter)](const std::vector<uint8_t>& data) {
        scatter(data);
    };
    const auto read = [&block, &w, time, offset, write, gather = std::move(gather)] {
        const auto data = gather(block.shared.data() + offset);
        if (block.cluster.launch.lands_early()) {
            write(data);
        } else {
            block.copies.push_back({w.bulk_writes, time, [write, data] { write(data); }});
        }
    };
    if (block.cluster.launch.lands_early()) {
        read();
    } else {
        block.copies.push_back({reads, time, read});
    }
}

GlobalAccess next_bulk_write(Warp& w, bool is_reduction) {
    if (!w.bulk_writes) w.bulk_writes = w.block.cluster.new_agent();
    return global_access_of(w, true, is_reduction, {w.bulk_writes, w.bulk_time + 1});
}

uint64_t shared_address(uint64_t address) {
    const auto [space, inside] = resolved(address);
    return space == Space::kShared ? inside : address;
}

std::vector<uint32_t> targets(const Warp& w, int lane, uint64_t address, bool is_multicast,
                              uint32_t mask) {
    if (!is_multicast) return {static_cast<uint32_t>(address >> kRankShift)};
    std::vector<uint32_t> ranks;
    for (uint32_t rank = 0; rank < 16; ++rank) {
        if (!(mask >> rank & 1)) continue;
        if (rank >= w.block.cluster.blocks.size()) {
            w.fault(kind::kInvalid, "the destination of a copy is not a block of the cluster",
                    lane);
        }
        ranks.push_back(rank);
    }
    return ranks;
}

void require_multiple_of_16(const Warp& w, int lane, uint32_t bytes) {
    if (bytes % 16)
        w.fault(kind::kInvalid, "the size of a bulk copy must be a multiple of 16 bytes", lane);
}

namespace {

template <class T, char Operation>
void reduce(uint8_t* target, const uint8_t* source, uint32_t bytes) {
    for (uint32_t at = 0; at < bytes; at += sizeof(T)) {
        T a, b;
        std::memcpy(&a, target + at, sizeof a);
        std::memcpy(&b, source + at, sizeof b);
        if constexpr (Operation == '+') {
            if constexpr (std::is_integral_v<T>) {
                a = static_cast<T>(a + b);
            } else {
                a = static_cast<T>(static_cast<Wider<T>>(a) + static_cast<Wider<T>>(b));
            }
        } else if constexpr (Operation == '<') {
            if (b < a) a = b;
        } else if constexpr (Operation == '>') {
            if (a < b) a = b;
        } else if constexpr (std::is_integral_v<T>) {
            a = Operation == '&' ? a & b : Operation == '|' ? a | b : a ^ b;
        }
        std::memcpy(target + at, &a, sizeof a);
    }
}

template <class T>
Reduce reduction(const std::string& operation) {
    if (operation == "add") return reduce<T, '+'>;
    if (operation == "min") return reduce<T, '<'>;
    if (operation == "max") return reduce<T, '>'>;
    if constexpr (std::is_integral_v<T>) {
        if (operation == "and") return reduce<T, '&'>;
        if (operation == "or") return reduce<T, '|'>;
        if (operation == "xor") return reduce<T, '^'>;
    }
    return nullptr;
}

}  // namespace

Reduce reduction_of(const std::string& operation, const std::string& type) {
    if (type == "u32" || type == "b32") return reduction<uint32_t>(operation);
    if (type == "s32") return reduction<int32_t>(operation);
    if (type == "u64" || type == "b64") return reduction<uint64_t>(operation);
    if (type == "s64") return reduction<int64_t>(operation);
    if (type == "f16") return reduction<Half>(operation);
    if (type == "bf16") return reduction<Bfloat>(operation);
    if (type == "f32") return reduction<float>(operation);
    if (type == "f64") return reduction<double>(operation);
    return nullptr;
}

Reduce reduction_of(const std::string& operation, uint8_t tensor_map_element) {
    static constexpr const char* kTypes[] = {"",    "",    "u32", "s32", "u64", "s64",
                                             "f16", "f32", "f32", "f64", "bf16"};
    return tensor_map_element < std::size(kTypes)
               ? reduction_of(operation, std::string(kTypes[tensor_map_element]))
               : nullptr;
}

}  // namespace ptx
