#include <sstream>

#include "machine.h"

namespace ptx {

Warp::Warp(Block& block, int index, Mask lanes)
    : block(block),
      index(index),
      thread_registers(block.cluster.launch.program.thread_registers),
      registers_(block.cluster.launch.program.register_bytes) {
    const Program& program = block.cluster.launch.program;
    defined_.resize(program.register_count);
    accumulating.resize(program.register_count);
    feeding.resize(program.register_count);
    unfenced.resize(program.register_count);
    for (const Operand& r : program.never_written) {
        const size_t bytes = r.width == 1 ? sizeof(Mask) : kLanes * (r.width / 8);
        for (size_t n = 0; n < bytes; ++n) {
            registers_[r.offset + n] = static_cast<uint8_t>(block.cluster.launch.random());
        }
        defined_[r.number] = kAllLanes;
    }
    fragments_.push_back({0, lanes, {}});
    known.seen.set(block.agent_of_warp(index), 1);
}

Mask Warp::alive() const {
    Mask lanes = 0;
    for (const Fragment& f : fragments_) lanes |= f.lanes;
    return lanes;
}

bool Warp::is_runnable() const {
    for (const Fragment& f : fragments_) {
        if (block.has_ended(f.wait)) return true;
    }
    return false;
}

// The one that is furthest behind, so that lanes on different branches reconverge.
Fragment* Warp::next_fragment() {
    Fragment* best = nullptr;
    for (Fragment& f : fragments_) {
        if (!block.has_ended(f.wait)) continue;
        if (!best || f.pc < best->pc) best = &f;
    }
    return best;
}

Fragment* Warp::any_fragment() {
    std::vector<Fragment*> able;
    for (Fragment& f : fragments_) {
        if (block.has_ended(f.wait)) able.push_back(&f);
    }
    return able.empty() ? nullptr : able[block.cluster.launch.random() % able.size()];
}

bool Warp::run(int quantum) {
    // Lanes that are behind may be waiting for lanes that are ahead.
    constexpr int kPatience = 16;
    // The limit also counts invisible instructions.
    constexpr int kLongestTurn = 1 << 14;
    Launch& launch = block.cluster.launch;
    bool ran = false;
    polls = false;
    diverged_turns_ = fragments_.size() > 1 ? diverged_turns_ + 1 : 0;
    for (int steps = 0; quantum > 0 && steps < kLongestTurn && !polls; ++steps) {
        Fragment* f = diverged_turns_ > kPatience ? any_fragment() : next_fragment();
        if (!f) break;
        quantum -= launch.program.code[f->pc].is_visible;
        step(*f);
        ran = true;
    }
    fragment = nullptr;
    return ran;
}

void Warp::step(Fragment& f) {
    Launch& launch = block.cluster.launch;
    const Instruction& i = launch.program.code[f.pc];
    fragment = &f;
    active = f.lanes;
    ++block.cluster.launch.ticks;
    if (i.guard.kind == Operand::Kind::kRegister) active &= predicate(i.guard);
    const bool resumed = f.wait.kind != Wait::Kind::kNone;
    if (!resumed) {
        Count& count = launch.counts[f.pc];
        count.warps += 1;
        count.lanes += std::popcount(active);
    }
    if (i.is_branch) return branch(f, i, active);
    if (i.is_exit) return exit(f);
    Next next = Next::kFollowing;
    if (active) {
        if (i.is_aligned && active != alive()) {
            if (fragments_.size() == 1)
                fault(kind::kDivergence, "not all lanes of the warp have arrived");
            next = suspend(Wait::Kind::kOtherLanes, 0, 0);
        } else {
            if (i.uses_wgmma_registers && !products.empty()) check_registers(i);
            passes_unknown = i.passes_unknown;
            next = i.execute(*this, i);
            passes_unknown = false;
            unknown = 0;  // for products, which land while the warp executes other instructions
        }
    }
    if (next == Next::kFollowing) {
        f.wait = {};
        ++f.pc;
    }
    merge();
}

void Warp::exit(Fragment& f) {
    block.cluster.launch.note_progress();
    f.lanes &= ~active;
    ++f.pc;
    std::erase_if(fragments_, [](const Fragment& one) { return !one.lanes; });
    // Lanes that exited are not waited for.
    for (Fragment& one : fragments_) {
        if (one.wait.kind == Wait::Kind::kOtherLanes) one.wait.phase = kLanesLeft;
    }
    if (fragments_.empty()) block.complete_barriers_of_block();
    block.cluster.complete_phase_if_due();
    merge();
}

void Warp::branch(Fragment& f, const Instruction& i, Mask taken) {
    const Mask others = f.lanes & ~taken;
    if (i.is_uniform && taken && others) {
        fault(kind::kDivergence, "lanes diverge in a uniform branch");
    }
    if (i[0].kind == Operand::Kind::kTarget) {
        if (!taken) {
            ++f.pc;
        } else if (!others) {
            f.pc = static_cast<int>(i[0].value);
        } else {
            f.lanes = others;
            ++f.pc;
            fragments_.push_back({static_cast<int>(i[0].value), taken, {}});
        }
    } else {  // brx.idx: each lane chooses from a list
        active = taken;
        const auto choice = bits<uint32_t>(i[0]);
        const auto& targets = i[1].elements;
        std::map<int, Mask> by_target;
        for (int l = 0; l < kLanes; ++l) {
            if (!(taken >> l & 1)) continue;
            if (choice[l] >= targets.size()) fault(kind::kInvalid, "branch beyond its list", l);
            by_target[static_cast<int>(targets[choice[l]].value)] |= 1u << l;
        }
        f.lanes = others;
        ++f.pc;
        for (auto [target, lanes] : by_target) fragments_.push_back({target, lanes, {}});
        std::erase_if(fragments_, [](const Fragment& one) { return !one.lanes; });
    }
    merge();
}

// Joins lanes that are at the same instruction, unless they wait for something else.
void Warp::merge() {
    if (fragments_.size() < 2) return;
    const auto may_join = [](const Fragment& f) {
        return f.wait.kind == Wait::Kind::kNone || f.wait.kind == Wait::Kind::kOtherLanes;
    };
    for (size_t a = 0; a < fragments_.size(); ++a) {
        for (size_t b = fragments_.size() - 1; b > a; --b) {
            Fragment &one = fragments_[a], &other = fragments_[b];
            if (one.pc != other.pc || !may_join(one) || !may_join(other)) continue;
            one.lanes |= other.lanes;
            one.wait = {};
            fragments_.erase(fragments_.begin() + static_cast<long>(b));
        }
    }
}

Next Warp::suspend(Wait::Kind kind, uint64_t key, uint64_t phase) {
    fragment->wait = {kind, key, phase};
    return Next::kAgain;
}

bool Warp::gathers(Mask members) {
    members &= alive();
    if ((active & members) == members) return true;
    suspend(Wait::Kind::kOtherLanes, 0, 0);
    return false;
}

void Warp::check_registers(const Instruction& i) const {
    if (i.is_product) return;  // products of one shape may be consecutive
    for (uint16_t r : i.registers) {
        if (accumulating[r] || feeding[r]) {
            fault(kind::kInFlight, "use of a register of a wgmma in flight");
        }
    }
}

Epoch Warp::epoch() const {
    const uint32_t agent = block.agent_of_warp(index);
    return {agent, known.seen[agent]};
}

void Warp::advance() {
    const Epoch now = epoch();
    known.seen.set(now.agent, now.time + 1);
}

void Warp::order_lanes() {
    advance();
    lanes_ordered = epoch().time;
    copies_ordered = known.seen[block.agent_of_copies(index)];
}

void Warp::acquire(const ClusterClocks& released) {
    known.others.join(released);
    if (const Clock* own = released.find(block.cluster.number)) known.seen.join(*own);
}

ClusterClocks Warp::known_of_all() const {
    ClusterClocks all = known.others;
    all.join(block.cluster.number, known.seen);
    return all;
}

void Warp::note_unknown(const Operand& o) const {
    const Mask missing = active & ~defined_[o.number];
    if (!missing) return;
    unknown |= missing;
    if (!passes_unknown) {
        fault(kind::kUninitialized, "use of a value that depends on uninitialized registers",
              std::countr_zero(missing));
    }
}

Mask Warp::predicate(const Operand& o) const {
    if (o.kind == Operand::Kind::kInteger) return o.value ? kAllLanes : 0;
    if (o.kind == Operand::Kind::kSink) return kAllLanes;
    if (o.kind != Operand::Kind::kRegister) fault(kind::kUnsupported, "operand is not a predicate");
    note_unknown(o);
    Mask value;
    std::memcpy(&value, registers_.data() + o.offset, sizeof value);
    return o.negated ? ~value : value;
}

void Warp::set_predicate(const Operand& o, Mask value) {
    if (o.kind == Operand::Kind::kSink) return;
    Mask old;
    std::memcpy(&old, registers_.data() + o.offset, sizeof old);
    old = (old & ~active) | (value & active);
    std::memcpy(registers_.data() + o.offset, &old, sizeof old);
    defined_[o.number] = (defined_[o.number] | active) & ~(unknown & active);
}

Lanes<uint64_t> Warp::addresses(const Operand& address) const {
    const Operand& base = address.elements.at(0);
    auto all = bits<uint64_t>(base);
    // Shared addresses have 32 bits, and their sums wrap.
    const bool narrow = base.kind == Operand::Kind::kRegister && base.width == 32;
    for (auto& one : all) {
        one += static_cast<uint64_t>(address.value);
        if (narrow) one &= 0xFFFFFFFF;
    }
    return all;
}

void Warp::require(const std::optional<Violation>& violation, int lane, uint64_t address) const {
    if (violation) fault(violation->kind, violation->message, lane, address);
}

std::string Warp::where() const {
    std::ostringstream text;
    for (const Fragment& f : fragments_) {
        const Instruction& i = block.cluster.launch.program.code[static_cast<size_t>(f.pc)];
        text << "block (" << block.index.x << ", " << block.index.y << ", " << block.index.z
             << "), warp " << index << " at line " << i.line << ": " << i.name() << "; ";
    }
    return text.str();
}

void Warp::fault_at(int pc, const char* kind, const std::string& message) {
    Fragment there{pc, 0, {}};
    fragment = &there;
    fault(kind, message);
}

void Warp::fault_at_wait(const char* kind, const std::string& message) {
    fault_at(fragments_.front().pc, kind, message);
}

void Warp::fault(const char* kind, const std::string& message, int lane, uint64_t address) const {
    Fault fault;
    fault.kind = kind;
    fault.message = message;
    fault.instruction = pc();
    std::ostringstream text;
    text << "(" << block.index.x << ", " << block.index.y << ", " << block.index.z << ")";
    fault.block = text.str();
    fault.warp = index;
    fault.lane = lane;
    fault.address = address;
    throw fault;
}

}  // namespace ptx
