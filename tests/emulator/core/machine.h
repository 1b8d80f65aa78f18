// A launch: clusters of blocks, blocks of warps, and their shared state.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "clocks.h"
#include "fault.h"
#include "global_memory.h"
#include "program.h"
#include "shared_memory.h"
#include "tensor_memory.h"

namespace ptx {

struct Dim {
    uint32_t x = 1, y = 1, z = 1;

    uint32_t count() const { return x * y * z; }
    Dim at(uint32_t i) const { return {i % x, i / x % y, i / (x * y)}; }
};

// How often an instruction ran, and the traffic it caused.
struct Count {
    uint64_t warps = 0;         // warps that executed it
    uint64_t lanes = 0;         // active lanes
    uint64_t shared_waves = 0;  // passes over the banks of shared memory
    uint64_t sectors = 0;       // of 32 bytes of global memory
};

// The epochs at which a tensor map in global memory was modified, and fenced afterwards.
struct TensorMapWrites {
    uint32_t written, fenced, time;
};

class Block;
class Cluster;

struct Launch {
    const Program& program;
    Dim grid, block, cluster;
    GlobalMemory& memory;
    std::vector<uint8_t> parameters;
    uint32_t shared_bytes;
    uint64_t seed;                     // of interleavings
    uint64_t approximation_seed;       // of the errors of approximate instructions
    std::optional<uint32_t> resident;  // clusters that run side by side; drawn if not given
    std::vector<Count> counts;

    std::mt19937_64 random{seed};
    uint64_t ticks = 0;          // read by clock registers
    uint64_t last_progress = 0;  // of any cluster
    uint64_t polls = 0;          // since then, of all warps
    // Modified ones, by address. Their agents belong to no cluster.
    std::map<uint64_t, TensorMapWrites> tensor_maps;
    // By bulk copies of clusters that have ended.
    std::vector<std::function<void()>> late_writes;

    void run();
    void note_progress() {
        last_progress = ticks;
        polls = 0;
    }
    // Whether an asynchronous operation lands immediately or as late as possible.
    bool lands_early() { return random() & 1; }

private:
    using Clusters = std::vector<std::unique_ptr<Cluster>>;

    // Faults at a warp that has not exited.
    void report_spinning(const Clusters& running, size_t pending) const;
};
// Instead of the number of a cluster, for agents that belong to none.
constexpr uint32_t kNoCluster = 0xFFFFFFFF;

// Generic addresses outside global memory.
constexpr uint64_t kSharedWindow = 0x7E00'0000'0000'0000, kLocalWindow = 0x7D00'0000'0000'0000;
constexpr uint64_t kParameterWindow = 0x7C00'0000'0000'0000;
constexpr uint64_t kWindowSize = 0x0001'0000'0000'0000;
// Each block of a cluster has a part of the shared window.
constexpr int kRankShift = 24;
constexpr uint32_t kRankMask = (1u << kRankShift) - 1;

// Why lanes are suspended.
struct Wait {
    enum class Kind { kNone, kBarrier, kCluster, kMBarrier, kWarpGroup, kRegisters, kOtherLanes };
    Kind kind = Kind::kNone;
    uint64_t key = 0;    // a barrier's number, an address, ...
    uint64_t phase = 0;  // the wait ends when the key's phase differs
};
constexpr uint64_t kLanesLeft = 1;  // the phase of a wait for other lanes that may have ended

// Lanes of a warp that are at the same instruction.
struct Fragment {
    int pc = 0;
    Mask lanes = 0;
    Wait wait;
};

// A wgmma that is in flight as far as this warp knows, and the registers that it uses.
struct Product {
    uint32_t time;
    std::vector<uint16_t> accumulators, fragments;
};

// A bulk copy that reads shared memory.
struct BulkCopy {
    uint32_t time;
    int lane, pc;
};

class Warp {
public:
    Warp(Block& block, int index, Mask lanes);

    Block& block;
    const int index;
    Knowledge known;
    Mask active = 0;               // lanes that execute the current instruction
    Fragment* fragment = nullptr;  // that they belong to
    // Lanes for which an operand of the current instruction depends on uninitialized registers, and
    // whether this makes its results unknown, too. If not, reading such an operand is a fault.
    mutable Mask unknown = 0;
    bool passes_unknown = false;
    std::vector<uint8_t> local;  // local memory of all lanes, one after the other
    std::vector<bool> local_written;

    bool is_done() const { return fragments_.empty(); }
    Mask alive() const;
    bool is_runnable() const;
    // Executes up to `quantum` instructions that are visible to other warps. False if none can run.
    bool run(int quantum);
    std::string where() const;
    // Acquires what agents of all clusters released.
    void acquire(const ClusterClocks& released);
    // Its knowledge of all clusters.
    ClusterClocks known_of_all() const;
    // A fault of an instruction that was executed before.
    [[noreturn]] void fault_at(int pc, const char* kind, const std::string& message);
    [[noreturn]] void fault_at_wait(const char* kind, const std::string& message);
    int pc() const { return fragment ? fragment->pc : -1; }

    // Operands. Inactive lanes have unspecified values.
    template <class U>
    Lanes<U> bits(const Operand& o) const;
    template <class T, int E = 1>
    std::array<T, kLanes * E> values(const Operand& o) const;
    Mask predicate(const Operand& o) const;
    // Results. Integers are sign-extended to wider registers.
    template <class U>
    void set(const Operand& o, const Lanes<U>& values);
    template <class T, int E>
    void set_values(const Operand& o, const std::array<T, kLanes * E>& values);
    void set_predicate(const Operand& o, Mask value);

    Lanes<uint64_t> addresses(const Operand& address) const;
    // The value of an operand that must be the same in all active lanes.
    template <class U>
    U uniform(const Operand& o) const;

    // The current epoch of this warp, for the access record of shared memory.
    Epoch epoch() const;
    // Ends an epoch, so that earlier accesses can be released without later ones.
    void advance();
    // At a barrier: accesses of each lane before it are ordered before those of all lanes after it.
    void order_lanes();

    [[noreturn]] void fault(const char* kind, const std::string& message, int lane = -1,
                            uint64_t address = 0) const;
    void require(const std::optional<Violation>& violation, int lane, uint64_t address) const;
    // Whether all living lanes of the mask have arrived; if not, the fragment waits for them.
    bool gathers(Mask members);
    // Suspends the fragment; the instruction runs again after the wait.
    Next suspend(Wait::Kind kind, uint64_t key, uint64_t phase);
    int first_lane() const { return std::countr_zero(active); }

    // By register: the number of products in flight that accumulate into it or read it, and whether
    // it was written since wgmma.fence.
    std::vector<uint8_t> accumulating, feeding, unfenced;
    std::deque<Product> products;
    uint32_t products_committed = 0;

    // The time of cp.async copies that are issued now, and that of each committed group.
    uint32_t copy_time = 1;
    std::vector<uint32_t> copy_groups;
    // When the lanes were last ordered, and the time of the copies that were complete then.
    uint32_t lanes_ordered = 1, copies_ordered = 0;
    // The same for bulk copies from shared memory, whose groups belong to lanes; those that may not
    // have read it completely; and the agent that writes their data to global memory.
    uint32_t bulk_time = 0;
    std::array<std::vector<uint32_t>, kLanes> bulk_groups;
    std::deque<BulkCopy> bulk_copies;
    uint32_t bulk_writes = 0;
    std::deque<BulkCopy> unwritten;  // bulk copies that may not have written completely
    // The times of the last load from, store to and product in tensor memory, and the products that
    // have not been executed, in order.
    uint32_t tensor_load_time = 0, tensor_store_time = 0, tensor_core_time = 0;
    std::deque<std::function<void()>> tensor_work;
    uint32_t thread_registers;       // of each lane, changed by setmaxnreg
    uint32_t cluster_copy_time = 0;  // of the last copy to another block's shared memory
    // The phase of the cluster's barrier in which it arrived, and the lanes that did.
    uint64_t cluster_arrival = 0;
    Mask cluster_arrived = 0;
    Knowledge released;  // its knowledge at its last fence
    // The same for all clusters, at its last fence for the whole GPU; and what others released
    // where it read by relaxed operations, which its next such fence acquires.
    ClusterClocks released_to_gpu, observed;
    // The last strong load from global memory, and whether repeating it returned the same value:
    // then the warp waits for others, and its turn ends.
    uint64_t polled_address = 0, polled_value = 0;
    bool polls = false;

private:
    friend class Block;

    Fragment* next_fragment();
    Fragment* any_fragment();
    void step(Fragment& f);
    void exit(Fragment& f);
    void branch(Fragment& f, const Instruction& i, Mask taken);
    void merge();
    Lanes<uint64_t> special64(const std::string& name) const;
    void check_registers(const Instruction& i) const;
    void note_unknown(const Operand& o) const;

    std::vector<Fragment> fragments_;
    int diverged_turns_ = 0;  // the number of turns since its lanes diverged
    std::vector<uint8_t> registers_;
    std::vector<Mask> defined_;  // lanes, by the number of a register
};

struct NamedBarrier {
    uint64_t phase = 0;
    bool is_of_block = false;  // of all threads that have not exited
    uint32_t arrived = 0, expected = 0;
    Knowledge arriving, complete;
    uint32_t yes = 0, votes = 0;              // counted by bar.red
    uint32_t final_yes = 0, final_votes = 0;  // of the completed phase
};

struct MBarrier {
    uint32_t agent = 0;  // of the asynchronous copies that complete on it
    uint32_t count = 0, pending = 0;
    int64_t transactions = 0;  // bytes that are still expected
    uint32_t in_flight = 0;    // bulk copies that have not landed
    uint64_t phase = 0;
    Knowledge arriving, complete;
};

// An asynchronous operation, which lands immediately or when it is waited for.
struct Pending {
    uint32_t agent, time;  // a wait for these makes it land
    std::function<void()> land;
};

// The last bulk copy that completes on an mbarrier of the block.
struct Incoming {
    uint32_t time;
    Warp* issuer;
    int pc;
};

struct WarpGroup {
    uint32_t arrived = 0;  // warps at the instruction that they execute together
    uint64_t phase = 0;
    int pc = -1;
    std::array<uint64_t, 3> agreed{};  // the descriptors and scale-d, which must be equal
    Knowledge known;                   // the common knowledge of these warps
    std::deque<Pending> products;      // in flight, in order
    // The setmaxnreg that some warps of the group have executed, and these warps.
    int resizing_pc = -1;
    uint32_t resized = 0;
};

class Block {
public:
    Block(Cluster& cluster, uint32_t rank, Dim index);

    Cluster& cluster;
    const uint32_t rank;  // in the cluster
    const Dim index;
    SharedMemory shared;
    std::vector<Warp> warps;
    std::array<NamedBarrier, 16> barriers;
    std::map<uint32_t, MBarrier> mbarriers;  // by address
    std::vector<WarpGroup> warp_groups;
    std::deque<Pending> copies;
    std::map<uint32_t, Incoming> incoming;  // by the mbarrier's agent
    TensorMemory tensor_memory;
    uint32_t free_registers = 0;  // that warps have released

    bool has_ended(const Wait& wait);
    bool is_done() const;
    uint32_t shared_base() const { return rank << kRankShift; }
    uint32_t linear_index() const;

    // Agents of this block.
    uint32_t agent_of_warp(int warp) const { return base_agent_ + warp; }
    uint32_t agent_of_copies(int warp) const { return base_agent_ + n_warps_ + warp; }
    uint32_t agent_of_bulk(int warp) const { return base_agent_ + 2 * n_warps_ + warp; }
    uint32_t agent_of_tensor_cores(int warp) const { return base_agent_ + 3 * n_warps_ + warp; }
    uint32_t agent_of_cluster_copies(int warp) const { return base_agent_ + 4 * n_warps_ + warp; }
    uint32_t agent_of_tensor_loads(int warp) const { return base_agent_ + 5 * n_warps_ + warp; }
    uint32_t agent_of_tensor_stores(int warp) const { return base_agent_ + 6 * n_warps_ + warp; }
    uint32_t agent_of_products(int group) const { return base_agent_ + 7 * n_warps_ + group; }

    // Lands all copies of the agent up to the time.
    void land(uint32_t agent, uint32_t time);
    // Threads of warps that have not exited.
    uint32_t living_threads() const;
    void complete_if_due(NamedBarrier& barrier);
    void complete_barriers_of_block();  // if the warps that have not arrived have exited
    MBarrier& mbarrier(const Warp& warp, uint32_t address);
    void arrive(MBarrier& barrier, const Knowledge& known, uint32_t count);
    void add_transactions(MBarrier& barrier, int64_t bytes);

private:
    uint32_t n_warps_, base_agent_;

    void complete_phase_if_due(MBarrier& barrier);
};

class Cluster {
public:
    Cluster(Launch& launch, uint32_t number, Dim index);

    Launch& launch;
    const uint32_t number;  // in the launch
    std::vector<std::unique_ptr<Block>> blocks;
    // The barrier of the cluster.
    uint64_t phase = 0;
    Knowledge arriving, complete;

    // Lets warps run for some turns, or until one of them polls. False if all have exited.
    bool run(int turns);
    // Ends the phase of the barrier if all lanes that have not exited have arrived.
    void complete_phase_if_due();
    // All instructions that its warps are at.
    std::string where() const;
    Warp* first_running() const;
    uint32_t agents_per_block() const;
    uint32_t static_agents() const { return agents_per_block() * launch.cluster.count(); }
    uint32_t new_agent() { return next_agent_++; }
    Block& block_of(const Warp& warp, uint64_t shared_address, int lane);
    uint32_t warps_per_block() const { return (launch.block.count() + kLanes - 1) / kLanes; }

private:
    // After all warps have exited: faults if asynchronous work still uses shared memory.
    void finish();

    uint32_t next_agent_;
};

}  // namespace ptx

#include "operands.h"
