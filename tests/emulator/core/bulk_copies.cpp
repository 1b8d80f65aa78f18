// cp.async.bulk: copies of contiguous bytes between global and shared memory, or between the
// shared memories of a cluster, and the groups that complete them.
#include "bulk.h"

namespace ptx {
namespace {

// setting[0]: whether the copy is sent to several blocks.
Next copy_from_global(Warp& w, const Instruction& i) {
    const auto to = w.addresses(i[0]), from = w.addresses(i[1]), signals = w.addresses(i[3]);
    const auto sizes = w.bits<uint32_t>(i[2]);
    const auto masks = i.setting[0] ? w.bits<uint32_t>(i[4]) : filled(0u);
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        const uint64_t first = shared_address(to[l]);
        const uint32_t size = sizes[l];
        require_multiple_of_16(w, l, size);
        require_aligned(w, l, first, 16);
        require_aligned(w, l, from[l], 16);
        if (size == 0) continue;
        count_global(w, {from[l]}, size);
        for (uint32_t rank : targets(w, l, first, i.setting[0], masks[l])) {
            const uint64_t place =
                i.setting[0] ? in_block(signals[l], rank) : shared_address(signals[l]);
            const Signal signal = signal_at(w, l, place);
            const Epoch complete{signal.barrier->agent, signal.time};
            check_global(w, l, from[l], size, global_access_of(w, false, false, complete));
            uint8_t* target =
                begin_shared_write(w, l, in_block(first, rank), size, access_of(w, signal));
            land(w, signal, size,
                 [target, size, source = reinterpret_cast<const uint8_t*>(from[l])] {
                     std::memcpy(target, source, size);
                 });
        }
    }
    return Next::kFollowing;
}

// To the shared memory of a block of the cluster.
Next copy_in_cluster(Warp& w, const Instruction& i) {
    const auto to = w.addresses(i[0]), from = w.addresses(i[1]), signals = w.addresses(i[3]);
    const auto sizes = w.bits<uint32_t>(i[2]);
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1) || sizes[l] == 0) continue;
        const uint64_t source = shared_address(from[l]);
        const uint32_t size = sizes[l], agent = w.block.agent_of_cluster_copies(w.index);
        require_multiple_of_16(w, l, size);
        require_aligned(w, l, to[l], 16);
        require_aligned(w, l, source, 16);
        const Signal signal = signal_at(w, l, shared_address(signals[l]));
        const uint32_t time = ++w.cluster_copy_time;
        Access reads = access_of(w, signal);
        reads.epoch = {agent, time};
        w.block.incoming[agent] = {time, &w, w.pc()};
        const uint32_t offset = shared_offset(w, l, source, size);
        w.require(w.block.shared.read(offset, size, reads), l, source);
        uint8_t* target =
            begin_shared_write(w, l, shared_address(to[l]), size, access_of(w, signal));
        land(w, signal, size,
             [signal, target, size, agent, time, data = w.block.shared.data() + offset] {
                 std::memcpy(target, data, size);
                 // A wait for the data also orders the read of the source.
                 signal.barrier->arriving.seen.set(agent, time);
             });
    }
    return Next::kFollowing;
}

// setting[1]: the index of the operation in the opcode.
template <bool Reduces>
Next copy_to_global(Warp& w, const Instruction& i) {
    const auto to = w.addresses(i[0]), from = w.addresses(i[1]);
    const auto sizes = w.bits<uint32_t>(i[2]);
    const Reduce reduce =
        Reduces ? reduction_of(i.opcode[static_cast<size_t>(i.setting[1])], i.opcode.back())
                : nullptr;
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1) || sizes[l] == 0) continue;
        const uint64_t source = shared_address(from[l]);
        const uint32_t size = sizes[l];
        require_multiple_of_16(w, l, size);
        require_aligned(w, l, to[l], 16);
        require_aligned(w, l, source, 16);
        check_global(w, l, to[l], size, next_bulk_write(w, Reduces));
        count_global(w, {to[l]}, size);
        const auto target = reinterpret_cast<uint8_t*>(to[l]);
        land_in_groups(
            w, l, source, size,
            [size](const uint8_t* shared) { return std::vector<uint8_t>(shared, shared + size); },
            [target, reduce](const std::vector<uint8_t>& data) {
                if (reduce) return reduce(target, data.data(), static_cast<uint32_t>(data.size()));
                std::memcpy(target, data.data(), data.size());
            });
    }
    return Next::kFollowing;
}

// Groups belong to single threads.
Next commit(Warp& w, const Instruction&) {
    for (int l = 0; l < kLanes; ++l) {
        if (w.active >> l & 1) w.bulk_groups[static_cast<size_t>(l)].push_back(w.bulk_time);
    }
    return Next::kFollowing;
}

// setting[0]: whether to wait only for the reads of shared memory.
Next wait(Warp& w, const Instruction& i) {
    const auto pending = static_cast<size_t>(i[0].value);
    const uint32_t reads = w.block.agent_of_bulk(w.index);
    for (int l = 0; l < kLanes; ++l) {
        const auto& groups = w.bulk_groups[static_cast<size_t>(l)];
        if (!(w.active >> l & 1) || groups.size() <= pending) continue;
        const uint32_t time = groups[groups.size() - 1 - pending];
        w.block.land(reads, time);
        const auto is_complete = [&](const BulkCopy& copy) {
            return copy.lane == l && copy.time <= time;
        };
        std::erase_if(w.bulk_copies, is_complete);
        if (i.setting[0]) continue;
        w.block.land(w.bulk_writes, time);
        std::erase_if(w.unwritten, is_complete);
    }
    // Copies of other lanes may still be in flight.
    const auto complete = [&](const std::deque<BulkCopy>& others) {
        return others.empty() ? w.bulk_time : others.front().time - 1;
    };
    w.known.seen.set(reads, complete(w.bulk_copies));
    if (!i.setting[0] && w.bulk_writes) w.known.seen.set(w.bulk_writes, complete(w.unwritten));
    return Next::kFollowing;
}

Next nothing(Warp&, const Instruction&) { return Next::kFollowing; }

// The rest of cp.async.bulk and cp.reduce.async.bulk.
Execute decode_bulk(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    m.take("bulk");
    if (m.take("commit_group")) return commit;
    if (m.take("wait_group")) {
        i.setting[0] = m.take("read");
        return wait;
    }
    m.skip_hints();
    if (m.has("tensor")) return decode_tensor_copy(m, i);
    if (m.take("prefetch")) return m.take("global") ? nothing : nullptr;
    const bool reduces = m.take("reduce");
    const std::string to = m.pop_front(), from = m.pop_front();
    const bool to_shared = to.starts_with("shared::"), from_shared = from == "shared::cta";
    if (to_shared) {
        if (reduces || !m.take("mbarrier::complete_tx::bytes")) return nullptr;
        i.setting[0] = m.take("multicast::cluster");
        return from_shared ? copy_in_cluster : from == "global" ? copy_from_global : nullptr;
    }
    if (to != "global" || !from_shared || !m.take("bulk_group")) return nullptr;
    if (!reduces) return copy_to_global<false>;
    const bool is_exact = m.take("noftz");
    const std::string type = m.type(), operation = m.type();
    i.setting[1] = static_cast<int64_t>(i.opcode.size()) - (is_exact ? 3 : 2);
    return reduction_of(operation, type) ? copy_to_global<true> : nullptr;
}

}  // namespace

void add_bulk_copies(Decoders& all) { all["cp.async.bulk"] = decode_bulk; }

}  // namespace ptx
