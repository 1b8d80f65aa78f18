#include <algorithm>
#include <numeric>
#include <utility>

#include "machine.h"

namespace ptx {
namespace {

// Numbers of visible instructions that a warp runs before another may: short turns find errors that
// depend on single accesses, long ones let a warp run far ahead.
constexpr int kTurns[] = {1, 4, 16, 64, 256, 4096};
// After so many instructions without a write, an arrival or an exit, the warps are spinning, and
// also after so many turns that ended with a poll, between which others had as many turns.
constexpr uint64_t kStepsWithoutProgress = 4'000'000, kPollsWithoutProgress = 100'000;
// Numbers of turns of warps of a cluster before another cluster may have turns.
constexpr int kStays[] = {1, 8, 64, 512};
// The most clusters that run side by side if the number is drawn. Few are enough for blocks to
// overtake each other, and fit into caches.
constexpr uint32_t kMostDrawn = 3;

}  // namespace

Block::Block(Cluster& cluster, uint32_t rank, Dim index)
    : cluster(cluster),
      rank(rank),
      index(index),
      shared(cluster.launch.shared_bytes, cluster.static_agents(),
             cluster.launch.program.granule_shift),
      n_warps_(cluster.warps_per_block()),
      base_agent_(rank * cluster.agents_per_block()) {
    const uint32_t threads = cluster.launch.block.count();
    warps.reserve(n_warps_);
    for (uint32_t w = 0; w < n_warps_; ++w) {
        const uint32_t lanes = std::min<uint32_t>(kLanes, threads - w * kLanes);
        warps.emplace_back(*this, static_cast<int>(w),
                           lanes == kLanes ? kAllLanes : (1u << lanes) - 1);
    }
    warp_groups.resize((n_warps_ + 3) / 4);
}

uint32_t Block::linear_index() const {
    const Dim& grid = cluster.launch.grid;
    return index.x + grid.x * (index.y + grid.y * index.z);
}

bool Block::is_done() const {
    return std::all_of(warps.begin(), warps.end(), [](const Warp& warp) { return warp.is_done(); });
}

bool Block::has_ended(const Wait& wait) {
    switch (wait.kind) {
        case Wait::Kind::kNone: return true;
        case Wait::Kind::kBarrier: return barriers[wait.key].phase != wait.phase;
        case Wait::Kind::kCluster: return cluster.phase != wait.phase;
        case Wait::Kind::kMBarrier: {
            const auto found = mbarriers.find(static_cast<uint32_t>(wait.key));
            return found == mbarriers.end() || (found->second.phase & 1) != wait.phase;
        }
        case Wait::Kind::kWarpGroup: return warp_groups[wait.key].phase != wait.phase;
        case Wait::Kind::kRegisters: return wait.key <= free_registers;
        case Wait::Kind::kOtherLanes: return wait.phase == kLanesLeft;
    }
    return false;
}

void Block::land(uint32_t agent, uint32_t time) {
    std::vector<Pending> due;
    std::erase_if(copies, [&](Pending& copy) {
        const bool is_due = copy.agent == agent && copy.time <= time;
        if (is_due) due.push_back(std::move(copy));
        return is_due;
    });
    for (const Pending& copy : due) copy.land();
    if (!due.empty()) cluster.launch.note_progress();
}

uint32_t Block::living_threads() const {
    const auto living =
        std::count_if(warps.begin(), warps.end(), [](const Warp& warp) { return !warp.is_done(); });
    return static_cast<uint32_t>(living) * kLanes;
}

void Block::complete_if_due(NamedBarrier& barrier) {
    if (barrier.arrived < barrier.expected) return;
    cluster.launch.note_progress();
    barrier.complete.join(barrier.arriving);
    barrier.final_yes = std::exchange(barrier.yes, 0);
    barrier.final_votes = std::exchange(barrier.votes, 0);
    barrier.arrived = 0;
    barrier.phase += 1;
}

void Block::complete_barriers_of_block() {
    for (NamedBarrier& barrier : barriers) {
        if (!barrier.arrived || !barrier.is_of_block) continue;
        barrier.expected = living_threads();
        complete_if_due(barrier);
    }
}

MBarrier& Block::mbarrier(const Warp& warp, uint32_t address) {
    const auto found = mbarriers.find(address);
    if (found == mbarriers.end()) {
        warp.fault(kind::kUninitialized, "the mbarrier was not initialized", -1, address);
    }
    return found->second;
}

void Block::arrive(MBarrier& barrier, const Knowledge& known, uint32_t count) {
    barrier.arriving.join(known);
    barrier.pending -= std::min(count, barrier.pending);
    complete_phase_if_due(barrier);
}

void Block::add_transactions(MBarrier& barrier, int64_t bytes) {
    barrier.transactions += bytes;
    complete_phase_if_due(barrier);
}

void Block::complete_phase_if_due(MBarrier& barrier) {
    if (barrier.pending || barrier.transactions) return;
    cluster.launch.note_progress();
    barrier.complete.join(barrier.arriving);
    // Writes of asynchronous copies in this phase are visible through both proxies.
    const auto time = static_cast<uint32_t>(barrier.phase + 1);
    barrier.complete.seen.set(barrier.agent, time);
    barrier.complete.fenced.set(barrier.agent, time);
    barrier.phase += 1;
    barrier.pending = barrier.count;
}

Cluster::Cluster(Launch& launch, uint32_t number, Dim index)
    : launch(launch), number(number), next_agent_(static_agents()) {
    const Dim& shape = launch.cluster;
    for (uint32_t rank = 0; rank < shape.count(); ++rank) {
        const Dim inside = shape.at(rank);
        const Dim block{index.x * shape.x + inside.x, index.y * shape.y + inside.y,
                        index.z * shape.z + inside.z};
        blocks.push_back(std::make_unique<Block>(*this, rank, block));
    }
}

uint32_t Cluster::agents_per_block() const {
    return 7 * warps_per_block() + (warps_per_block() + 3) / 4;
}

Block& Cluster::block_of(const Warp& warp, uint64_t shared_address, int lane) {
    const uint64_t rank = shared_address >> kRankShift;
    if (rank >= blocks.size()) {
        warp.fault(kind::kOutOfBounds, "shared address outside the cluster", lane, shared_address);
    }
    Block& block = *blocks[rank];
    if (&block != &warp.block && block.is_done()) {
        warp.fault(kind::kInvalid, "shared memory of a block that has ended", lane, shared_address);
    }
    return block;
}

bool Cluster::run(int turns) {
    std::vector<Warp*> runnable;
    for (bool polls = false; turns > 0 && !polls; --turns) {
        runnable.clear();
        bool is_done = true;
        for (auto& block : blocks) {
            for (Warp& warp : block->warps) {
                is_done &= warp.is_done();
                if (warp.is_runnable()) runnable.push_back(&warp);
            }
        }
        if (is_done) {
            finish();
            return false;
        }
        std::vector<Block*> copying;
        for (auto& block : blocks) {
            if (!block->copies.empty()) copying.push_back(block.get());
        }
        const bool lands = runnable.empty() || (!copying.empty() && launch.random() % 32 == 0);
        if (lands && !copying.empty()) {
            Block& block = *copying[launch.random() % copying.size()];
            const auto which = static_cast<long>(launch.random() % block.copies.size());
            const Pending copy = std::move(block.copies[static_cast<size_t>(which)]);
            block.copies.erase(block.copies.begin() + which);
            copy.land();
            launch.note_progress();
            continue;
        }
        if (runnable.empty()) {
            first_running()->fault_at_wait(kind::kDeadlock, "no warp can proceed: " + where());
        }
        Warp& chosen = *runnable[launch.random() % runnable.size()];
        chosen.run(kTurns[launch.random() % std::size(kTurns)]);
        polls = chosen.polls;
        launch.polls += polls;
    }
    return true;
}

std::string Cluster::where() const {
    std::string text;
    for (const auto& block : blocks) {
        for (const Warp& warp : block->warps) text += warp.where();
    }
    return text;
}

Warp* Cluster::first_running() const {
    for (const auto& block : blocks) {
        for (Warp& warp : block->warps) {
            if (!warp.is_done()) return &warp;
        }
    }
    return nullptr;
}

void Cluster::complete_phase_if_due() {
    bool any = false;
    for (const auto& block : blocks) {
        for (const Warp& warp : block->warps) {
            if (warp.alive() & ~warp.cluster_arrived) return;
            any |= warp.cluster_arrived != 0;
        }
    }
    if (!any) return;
    complete.join(arriving);
    phase += 1;
    for (auto& block : blocks) {
        for (Warp& warp : block->warps) warp.cluster_arrived = 0;
    }
}

void Cluster::finish() {
    for (auto& block : blocks) {
        for (Warp& warp : block->warps) {
            if (warp.bulk_copies.empty()) continue;
            warp.fault_at(
                warp.bulk_copies.front().pc, kind::kInFlight,
                "the block ended without waiting until this copy has read its shared memory");
        }
        for (const WarpGroup& group : block->warp_groups) {
            if (!group.resized) continue;
            block->warps.front().fault_at(group.resizing_pc, kind::kDivergence,
                                          "not all warps of a warp group executed setmaxnreg");
        }
        if (!block->tensor_memory.is_empty()) {
            block->warps.front().fault_at(static_cast<int>(launch.program.code.size()) - 1,
                                          kind::kInvalid,
                                          "the block ended without freeing its tensor memory");
        }
        for (const auto& [agent, copy] : block->incoming) {
            const bool is_known = std::any_of(
                block->warps.begin(), block->warps.end(),
                [&](const Warp& warp) { return warp.known.seen.covers({agent, copy.time}); });
            if (is_known) continue;
            copy.issuer->fault_at(
                copy.pc, kind::kInFlight,
                "the block ended without waiting for this copy, which uses its shared memory");
        }
    }
    for (auto& block : blocks) {
        for (Pending& copy : block->copies) {
            const bool writes_global =
                std::any_of(block->warps.begin(), block->warps.end(),
                            [&](const Warp& warp) { return warp.bulk_writes == copy.agent; });
            if (writes_global) launch.late_writes.push_back(std::move(copy.land));
        }
    }
}

void Launch::run() {
    const Dim clusters{grid.x / cluster.x, grid.y / cluster.y, grid.z / cluster.z};
    std::vector<uint32_t> pending(clusters.count());
    std::iota(pending.begin(), pending.end(), 0);
    std::shuffle(pending.begin(), pending.end(), random);
    const uint32_t places = resident.value_or(1 + random() % kMostDrawn);
    Clusters running;
    for (;;) {
        while (running.size() < places && !pending.empty()) {
            const uint32_t number = pending.back();
            pending.pop_back();
            running.push_back(std::make_unique<Cluster>(*this, number, clusters.at(number)));
            note_progress();
        }
        const bool lands = running.empty() || random() % 8 == 0;
        if (lands && !late_writes.empty()) {
            std::swap(late_writes[random() % late_writes.size()], late_writes.back());
            late_writes.back()();
            late_writes.pop_back();
            continue;
        }
        if (running.empty()) return;
        const bool spins =
            ticks - last_progress > kStepsWithoutProgress || polls > kPollsWithoutProgress;
        if (spins) report_spinning(running, pending.size());
        const auto chosen = running.begin() + static_cast<long>(random() % running.size());
        if (!(*chosen)->run(kStays[random() % std::size(kStays)])) running.erase(chosen);
    }
}

void Launch::report_spinning(const Clusters& running, size_t pending) const {
    std::string text = "the warps are spinning";
    if (pending) text += ", and no place is free for " + std::to_string(pending) + " more clusters";
    text += ": ";
    for (const auto& one : running) text += one->where();
    for (const auto& one : running) {
        if (Warp* warp = one->first_running()) warp->fault_at_wait(kind::kDeadlock, text);
    }
}

}  // namespace ptx
