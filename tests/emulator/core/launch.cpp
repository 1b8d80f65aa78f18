#include <algorithm>
#include <numeric>
#include <utility>

#include "machine.h"

namespace ptx {
namespace {

// Numbers of visible instructions that a warp runs before another may: short turns find errors that
// depend on single accesses, long ones let a warp run far ahead.
constexpr int kTurns[] = {1, 4, 16, 64, 256, 4096};
// After so many instructions without a write, an arrival or an exit, the warps are spinning.
constexpr uint64_t kStepsWithoutProgress = 4'000'000;

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
}

uint32_t Block::living_threads() const {
    const auto living =
        std::count_if(warps.begin(), warps.end(), [](const Warp& warp) { return !warp.is_done(); });
    return static_cast<uint32_t>(living) * kLanes;
}

void Block::complete_if_due(NamedBarrier& barrier) {
    if (barrier.arrived < barrier.expected) return;
    cluster.note_progress();
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
    cluster.note_progress();
    barrier.complete.join(barrier.arriving);
    // Writes of asynchronous copies in this phase are visible through both proxies.
    const auto time = static_cast<uint32_t>(barrier.phase + 1);
    barrier.complete.seen.set(barrier.agent, time);
    barrier.complete.fenced.set(barrier.agent, time);
    barrier.phase += 1;
    barrier.pending = barrier.count;
}

Cluster::Cluster(Launch& launch, Dim index)
    : launch(launch),
      random(launch.seed * 0x9E3779B97F4A7C15 + index.x + 1009 * (index.y + 1009 * index.z)),
      next_agent_(static_agents()) {
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

void Cluster::run() {
    std::vector<Warp*> runnable;
    for (;;) {
        runnable.clear();
        bool is_done = true;
        for (auto& block : blocks) {
            for (Warp& warp : block->warps) {
                is_done &= warp.is_done();
                if (warp.is_runnable()) runnable.push_back(&warp);
            }
        }
        if (is_done) return finish();
        std::vector<Block*> copying;
        for (auto& block : blocks) {
            if (!block->copies.empty()) copying.push_back(block.get());
        }
        const bool lands = runnable.empty() || (!copying.empty() && random() % 32 == 0);
        if (lands && !copying.empty()) {
            Block& block = *copying[random() % copying.size()];
            const auto which = static_cast<long>(random() % block.copies.size());
            const Pending copy = std::move(block.copies[static_cast<size_t>(which)]);
            block.copies.erase(block.copies.begin() + which);
            copy.land();
            note_progress();
            continue;
        }
        if (runnable.empty() || ticks - last_progress_ > kStepsWithoutProgress) {
            std::string where;
            for (auto& block : blocks) {
                for (Warp& warp : block->warps) where += warp.where();
            }
            const char* what =
                runnable.empty() ? "no warp can proceed: " : "the warps are spinning: ";
            for (auto& block : blocks) {
                for (Warp& warp : block->warps) {
                    if (!warp.is_done()) warp.fault_at_wait(kind::kDeadlock, what + where);
                }
            }
        }
        runnable[random() % runnable.size()]->run(kTurns[random() % std::size(kTurns)]);
    }
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
    // The remaining copies write to global memory.
    for (auto& block : blocks) {
        while (!block->copies.empty()) {
            const Pending copy = std::move(block->copies.front());
            block->copies.pop_front();
            copy.land();
        }
    }
}

void Launch::run() {
    const Dim clusters{grid.x / cluster.x, grid.y / cluster.y, grid.z / cluster.z};
    std::vector<uint32_t> order(clusters.count());
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
    for (uint32_t i : order) Cluster(*this, clusters.at(i)).run();
}

}  // namespace ptx
