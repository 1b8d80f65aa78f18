// Barriers of blocks, warps and clusters, mbarriers, and fences.
#include "bulk.h"
#include "tensor_map.h"

namespace ptx {
namespace {

enum Role { kSync, kArrive, kReduce };

void release(Warp& w, Knowledge& others) {
    others.join(w.known);
    w.advance();
}

// setting[0]: the role; [1]: the reduction; [2]: whether whole warps take part.
Next barrier(Warp& w, const Instruction& i) {
    const size_t first = i.setting[0] == kReduce ? 1 : 0;
    const auto number = w.uniform<uint32_t>(i[first]);
    if (number >= w.block.barriers.size()) w.fault(kind::kInvalid, "barriers have numbers 0 to 15");
    NamedBarrier& barrier = w.block.barriers[number];
    const bool has_count = i.size() > first + (i.setting[0] == kReduce ? 2 : 1);
    const uint32_t expected =
        has_count ? w.uniform<uint32_t>(i[first + 1]) : w.block.living_threads();
    if (expected % kLanes) w.fault(kind::kInvalid, "barriers count whole warps");

    if (w.fragment->wait.kind != Wait::Kind::kBarrier) {
        if (barrier.arrived && barrier.expected != expected) {
            w.fault(kind::kInvalid, "warps at a barrier expect different numbers of threads");
        }
        barrier.expected = expected;
        barrier.is_of_block = !has_count;
        const Mask all = w.alive();
        barrier.arrived +=
            w.active == all ? kLanes : static_cast<uint32_t>(std::popcount(w.active));
        if (barrier.arrived > expected)
            w.fault(kind::kInvalid, "more threads than a barrier expects");
        if (i.setting[0] == kReduce) {
            const Mask vote = w.predicate(i[i.size() - 1]) & w.active;
            barrier.yes += static_cast<uint32_t>(std::popcount(vote));
            barrier.votes += static_cast<uint32_t>(std::popcount(w.active));
        }
        const uint64_t phase = barrier.phase;
        w.order_lanes();
        release(w, barrier.arriving);
        w.block.complete_if_due(barrier);
        if (i.setting[0] == kArrive) return Next::kFollowing;
        if (barrier.phase == phase) return w.suspend(Wait::Kind::kBarrier, number, phase);
    }
    w.known.join(barrier.complete);
    if (i.setting[0] == kReduce) {
        if (i.setting[1] == 0) {
            w.set(i[0], filled(barrier.final_yes));
        } else {
            const bool all = barrier.final_yes == barrier.final_votes;
            w.set_predicate(i[0],
                            (i.setting[1] == 1 ? all : barrier.final_yes > 0) ? kAllLanes : 0);
        }
    }
    return Next::kFollowing;
}

Next warp_barrier(Warp& w, const Instruction& i) {
    if (!w.gathers(w.uniform<uint32_t>(i[0]))) return Next::kAgain;
    w.order_lanes();
    return Next::kFollowing;
}

// setting[0]: whether only accesses before an earlier fence are released.
Next cluster_arrive(Warp& w, const Instruction& i) {
    Cluster& cluster = w.block.cluster;
    if (w.cluster_arrived & w.active)
        w.fault(kind::kInvalid, "a thread arrives twice at the cluster's barrier");
    w.cluster_arrival = cluster.phase;
    w.cluster_arrived |= w.active;
    if (i.setting[0]) {
        cluster.arriving.join(w.released);
    } else {
        release(w, cluster.arriving);
    }
    cluster.complete_phase_if_due();
    return Next::kFollowing;
}

Next cluster_wait(Warp& w, const Instruction&) {
    Cluster& cluster = w.block.cluster;
    if (cluster.phase == w.cluster_arrival)
        return w.suspend(Wait::Kind::kCluster, 0, cluster.phase);
    w.known.join(cluster.complete);
    w.order_lanes();
    return Next::kFollowing;
}

Execute decode_bar(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    if (m.take("warp")) return m.take("sync") ? warp_barrier : nullptr;
    if (m.take("cluster")) {
        const bool arrives = m.take("arrive");
        m.take("wait");
        i.setting[0] = m.take("relaxed");
        m.skip_hints();
        i.is_aligned = m.take("aligned");
        return arrives ? cluster_arrive : cluster_wait;
    }
    m.take("cta");
    // `bar` is an abbreviation of `barrier.aligned`.
    i.is_aligned = m.take("aligned") || i.opcode[0] == "bar";
    if (m.take("sync")) {
        i.setting[0] = kSync;
    } else if (m.take("arrive")) {
        i.setting[0] = kArrive;
    } else if (m.take("red")) {
        i.setting[0] = kReduce;
        const std::string what = m.take_any({"popc", "and", "or"});
        i.setting[1] = what == "popc" ? 0 : what == "and" ? 1 : 2;
        m.type();
    } else {
        return nullptr;
    }
    return barrier;
}

// Outstanding copies cannot complete on an mbarrier that no longer exists.
void require_idle(const Warp& w, int lane, uint64_t address) {
    const auto found = w.block.mbarriers.find(static_cast<uint32_t>(address & kRankMask));
    if (found != w.block.mbarriers.end() && found->second.in_flight) {
        w.fault(kind::kInFlight, "bulk copies that complete on this mbarrier are in flight", lane,
                address);
    }
}

Next mbarrier_init(Warp& w, const Instruction& i) {
    const auto addresses = w.addresses(i[0]);
    const auto counts = w.bits<uint32_t>(i[1]);
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        const uint8_t opaque[8] = {};
        require_aligned(w, l, addresses[l], 8);
        require_idle(w, l, addresses[l]);
        write_shared(w, l, addresses[l], 8, opaque, access_of(w, l));
        MBarrier barrier;
        barrier.agent = w.block.cluster.new_agent();
        barrier.count = barrier.pending = counts[l];
        w.block.mbarriers[static_cast<uint32_t>(addresses[l] & kRankMask)] = barrier;
    }
    return Next::kFollowing;
}

Next mbarrier_inval(Warp& w, const Instruction& i) {
    const auto addresses = w.addresses(i[0]);
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        const uint8_t opaque[8] = {};
        require_idle(w, l, addresses[l]);
        write_shared(w, l, addresses[l], 8, opaque, access_of(w, l));
        w.block.mbarriers.erase(static_cast<uint32_t>(addresses[l] & kRankMask));
    }
    return Next::kFollowing;
}

// setting[0]: whether the third operand is a count; [1]: whether it is the expected bytes; [2]:
// whether there is a state; [3]: whether later phases expect one arrival less; [4]: whether it
// arrives.
Next mbarrier_arrive(Warp& w, const Instruction& i) {
    const size_t at = i.setting[2] ? 1 : 0;
    const auto addresses = w.addresses(i[at]);
    const bool has_number = i.size() > at + 1;
    const auto numbers = has_number ? w.bits<uint32_t>(i[at + 1]) : filled<uint32_t>(1);
    Lanes<uint64_t> states{};
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        MBarrier& barrier = mbarrier_at(w, l, addresses[l]);
        Block& owner = w.block.cluster.block_of(w, addresses[l], l);
        states[l] = barrier.phase;
        if (i.setting[1]) barrier.transactions += numbers[l];
        if (!i.setting[4]) continue;
        const uint32_t count = i.setting[1] ? 1 : numbers[l];
        if (count > barrier.pending) {
            w.fault(kind::kInvalid, "more arrivals than the mbarrier expects", l, addresses[l]);
        }
        if (i.setting[3]) barrier.count -= count;
        owner.arrive(barrier, w.known, count);
    }
    if (i.setting[4]) w.advance();
    if (i.setting[2]) w.set(i[0], states);
    return Next::kFollowing;
}

Next mbarrier_complete_tx(Warp& w, const Instruction& i) {
    const auto addresses = w.addresses(i[0]);
    const auto bytes = w.bits<uint32_t>(i[1]);
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        MBarrier& barrier = mbarrier_at(w, l, addresses[l]);
        w.block.cluster.block_of(w, addresses[l], l)
            .add_transactions(barrier, -static_cast<int64_t>(bytes[l]));
    }
    return Next::kFollowing;
}

// setting[0]: whether the phase is given by its parity; [1]: whether the instruction may wait.
Next mbarrier_wait(Warp& w, const Instruction& i) {
    const auto addresses = w.addresses(i[1]);
    const auto states = w.bits<uint64_t>(i[2]);
    Mask complete = 0;
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        const MBarrier& barrier = mbarrier_at(w, l, addresses[l]);
        if (shared_address(addresses[l]) >> kRankShift != w.block.rank) {
            w.fault(kind::kInvalid, "only the block of an mbarrier may wait for it", l,
                    addresses[l]);
        }
        const bool over =
            i.setting[0] ? (barrier.phase & 1) != (states[l] & 1) : barrier.phase > states[l];
        if (over) w.known.join(barrier.complete);
        complete |= static_cast<Mask>(over) << l;
    }
    const int first = w.first_lane();
    bool same = true;
    for (int l = first; l < kLanes; ++l) {
        if (w.active >> l & 1) same &= addresses[l] == addresses[first];
    }
    // A wait may also end at a time limit, and is then repeated by its loop.
    if (!complete && i.setting[1] && same && w.block.cluster.launch.random() % 4) {
        const uint64_t phase = i.setting[0] ? states[first] & 1 : states[first] & 1;
        return w.suspend(Wait::Kind::kMBarrier, addresses[first] & kRankMask, phase);
    }
    w.set_predicate(i[0], complete);
    return Next::kFollowing;
}

Execute decode_mbarrier(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    const std::string operation = m.pop_front();
    m.skip_hints();
    take_space(m);
    const bool expects = m.take("expect_tx");
    i.setting[0] = m.take("parity");
    m.take("b64");
    if (operation == "init") return mbarrier_init;
    if (operation == "inval") return mbarrier_inval;
    if (operation == "complete_tx") return mbarrier_complete_tx;
    if (operation == "test_wait" || operation == "try_wait") {
        i.setting[1] = operation == "try_wait";
        return mbarrier_wait;
    }
    if (operation == "arrive" || operation == "arrive_drop" || operation == "expect_tx") {
        m.take("noComplete");
        i.setting[1] = expects || operation == "expect_tx";
        i.setting[2] = i[0].kind != Operand::Kind::kAddress;
        i.setting[3] = operation == "arrive_drop";
        i.setting[4] = operation != "expect_tx";
        return mbarrier_arrive;
    }
    return nullptr;
}

Next fence_for_async_proxy(Warp& w, const Instruction&) {
    w.known.fenced.join(w.known.seen);
    w.advance();
    return Next::kFollowing;
}

// Later relaxed operations release the accesses before the fence.
Next fence(Warp& w, const Instruction&) {
    w.released = w.known;
    w.advance();
    return Next::kFollowing;
}

Next fence_of_gpu(Warp& w, const Instruction& i) {
    w.acquire(w.observed);
    w.released_to_gpu = w.known_of_all();
    return fence(w, i);
}

Next nothing(Warp&, const Instruction&) { return Next::kFollowing; }

Execute decode_fence(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    const bool is_of_gpu = m.has("gpu") || m.has("sys") || m.has("gl");
    Execute execute = is_of_gpu ? fence_of_gpu : fence;
    if (m.take("proxy")) {
        const bool is_async = m.has("async") && !m.has("global");
        const bool acquires_map = m.has("tensormap::generic") && m.has("acquire");
        execute = is_async ? fence_for_async_proxy : acquires_map ? fence_for_tensor_maps : nothing;
    }
    while (!m.empty()) m.type();
    return execute;
}

}  // namespace

MBarrier& mbarrier_at(Warp& w, int lane, uint64_t address) {
    address = shared_address(address);
    require_aligned(w, lane, address, 8);
    Block& owner = w.block.cluster.block_of(w, address, lane);
    MBarrier& barrier = owner.mbarrier(w, static_cast<uint32_t>(address & kRankMask));
    uint8_t ignored[8];
    read_shared(w, lane, address, 8, ignored, access_of(w, lane, true));
    return barrier;
}

void add_barriers(Decoders& all) {
    all["bar"] = decode_bar;
    all["barrier"] = decode_bar;
    all["mbarrier"] = decode_mbarrier;
    all["fence"] = decode_fence;
    all["membar"] = decode_fence;
}

}  // namespace ptx
