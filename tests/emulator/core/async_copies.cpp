// cp.async: copies from global to shared memory that the executing thread waits for.
#include "bulk.h"

namespace ptx {
namespace {

// The time of the last of all groups except the latest `pending`; 0 if there is none.
uint32_t time_of_groups(const std::vector<uint32_t>& groups, size_t pending) {
    return groups.size() > pending ? groups[groups.size() - pending - 1] : 0;
}

Next copy(Warp& w, const Instruction& i) {
    const auto size = static_cast<uint32_t>(i[2].value);
    const auto to = w.addresses(i[0]), from = w.addresses(i[1]);
    const bool has_size = i.size() > 3 && i[3].width != 1;
    const auto sizes = has_size ? w.bits<uint32_t>(i[3]) : filled(size);
    const Mask ignored = i.size() > 3 && !has_size ? w.predicate(i[3]) : 0;
    Block& block = w.block;
    const uint32_t agent = block.agent_of_copies(w.index);
    const bool early = block.cluster.launch.lands_early();
    count_global(w, of_active_lanes(w, from), size);
    count_shared(w, of_active_lanes(w, to), size);
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        const uint32_t present = ignored >> l & 1 ? 0 : std::min(sizes[l], size);
        require_aligned(w, l, to[l], size);
        if (present) {
            require_aligned(w, l, from[l], size);
            const Epoch complete{agent, w.copy_time};
            check_global(w, l, from[l], present, global_access_of(w, false, false, complete));
        }
        Access access = access_of(w, l);
        access.epoch = {agent, w.copy_time};
        const uint32_t offset = shared_offset(w, l, to[l], size);
        w.require(block.shared.write(offset, size, access, nullptr), l, to[l]);
        uint8_t* target = block.shared.data() + offset;
        const auto land = [=, source = reinterpret_cast<const uint8_t*>(from[l])] {
            std::fill_n(std::copy_n(source, present, target), size - present, uint8_t{0});
        };
        if (early) {
            land();
        } else {
            block.copies.push_back({agent, w.copy_time, land});
        }
    }
    return Next::kFollowing;
}

Next commit(Warp& w, const Instruction&) {
    w.copy_groups.push_back(w.copy_time++);
    return Next::kFollowing;
}

// setting[0]: whether to wait for all copies, committed or not.
Next wait(Warp& w, const Instruction& i) {
    if (i.setting[0]) commit(w, i);
    const size_t pending = i.setting[0] ? 0 : static_cast<size_t>(i[0].value);
    const uint32_t time = time_of_groups(w.copy_groups, pending);
    const uint32_t agent = w.block.agent_of_copies(w.index);
    w.block.land(agent, time);
    w.known.seen.set(agent, time);
    return Next::kFollowing;
}

// An arrival at an mbarrier, when the copies so far are complete. setting[0]: whether the mbarrier
// already expects it (noinc).
Next arrive_after_copies(Warp& w, const Instruction& i) {
    Block& block = w.block;
    const uint32_t agent = block.agent_of_copies(w.index), time = w.copy_time++;
    const uint64_t address = w.addresses(i[0])[w.first_lane()];
    const auto lanes = static_cast<uint32_t>(std::popcount(w.active));
    MBarrier& barrier = mbarrier_at(w, w.first_lane(), address);
    if (!i.setting[0]) barrier.pending += lanes;
    Knowledge known = w.known;
    known.seen.set(agent, time);
    w.advance();
    block.land(agent, time);
    const auto land = [&block, &barrier, known, lanes] { block.arrive(barrier, known, lanes); };
    if (block.cluster.launch.lands_early()) {
        land();
    } else {
        block.copies.push_back({agent, time, land});
    }
    return Next::kFollowing;
}

Execute decode_cp(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    if (!m.take("async")) return nullptr;
    if (m.has("bulk")) return decoders().at("cp.async.bulk")(m, i);
    if (m.take("commit_group")) return commit;
    if (m.take("wait_group")) return wait;
    if (m.take("wait_all")) {
        i.setting[0] = true;
        return wait;
    }
    if (m.take("mbarrier")) {
        i.setting[0] = m.take("noinc");
        m.take("arrive");
        take_space(m);
        m.type();
        return arrive_after_copies;
    }
    const bool bypasses_l1 = m.has("cg");
    m.skip_hints();
    m.take("global");
    take_space(m);
    const int64_t size = i.size() > 2 ? i[2].value : 0;
    return size == 16 || (!bypasses_l1 && (size == 4 || size == 8)) ? copy : nullptr;
}

}  // namespace

void add_async_copies(Decoders& all) { all["cp"] = decode_cp; }

}  // namespace ptx
