// Branches, moves, comparisons and selections.
#include <utility>

#include "machine.h"

namespace ptx {
namespace {

Next nothing(Warp&, const Instruction&) { return Next::kFollowing; }

Execute decode_bra(Modifiers& m, Instruction& i) {
    i.is_uniform = m.take("uni");
    i.is_branch = true;
    return nothing;
}

Execute decode_brx(Modifiers& m, Instruction& i) {
    m.take("idx");
    m.take("uni");
    i.is_branch = true;
    return nothing;
}

Execute decode_exit(Modifiers& m, Instruction& i) {
    m.take("uni");
    i.is_exit = true;
    return nothing;
}

Next trap(Warp& w, const Instruction&) {
    w.fault(kind::kTrap, "the kernel trapped", w.first_lane());
}

Execute decode_trap(Modifiers&, Instruction&) { return trap; }

// Instructions without observable effects.
Execute decode_nothing(Modifiers& m, Instruction&) {
    while (!m.empty()) m.type();
    return nothing;
}

// All warps of a warp group execute it before one of them executes the next. PTX demands that they
// synchronize in between, which this finds for most interleavings only.
void note_resizing(Warp& w) {
    Block& block = w.block;
    const size_t first = static_cast<size_t>(w.index) / 4 * 4, own = static_cast<size_t>(w.index);
    WarpGroup& group = block.warp_groups[first / 4];
    const size_t warps = std::min<size_t>(4, block.warps.size() - first);
    if (group.resized && group.resizing_pc != w.pc())
        w.fault(kind::kDivergence, "warps of a warp group execute different setmaxnreg");
    if (group.resized >> (own - first) & 1)
        w.fault(kind::kDivergence, "not all warps of the warp group executed the last setmaxnreg");
    group.resizing_pc = w.pc();
    group.resized |= 1u << (own - first);
    if (group.resized == (1u << warps) - 1) group.resized = 0;
}

// setting[0]: whether registers are added. They come from those that warps of the block released.
Next set_registers(Warp& w, const Instruction& i) {
    const int64_t wanted = i[0].value;
    if (wanted % 8 || wanted < 24 || wanted > 256)
        w.fault(kind::kInvalid, "the number of registers must be a multiple of 8 from 24 to 256");
    // Without a number of registers at launch, the assembler ignores the instruction.
    if (!w.thread_registers) return Next::kFollowing;
    if (w.fragment->wait.kind != Wait::Kind::kRegisters) note_resizing(w);
    const int64_t added = wanted - w.thread_registers;
    if (i.setting[0] ? added < 0 : added > 0) {
        const char* direction = i.setting[0] ? "an increase" : "a decrease";
        w.fault(kind::kInvalid, direction + (" from " + std::to_string(w.thread_registers)) +
                                    " registers to " + std::to_string(wanted));
    }
    const int64_t of_warp = added * kLanes;
    if (of_warp > w.block.free_registers)
        return w.suspend(Wait::Kind::kRegisters, static_cast<uint64_t>(of_warp), 0);
    w.block.free_registers = static_cast<uint32_t>(w.block.free_registers - of_warp);
    w.thread_registers = static_cast<uint32_t>(wanted);
    return Next::kFollowing;
}

Execute decode_setmaxnreg(Modifiers& m, Instruction& i) {
    i.is_aligned = i.is_visible = true;
    const std::string direction = m.take_any({"inc", "dec"});
    i.setting[0] = direction == "inc";
    const bool known =
        !direction.empty() && m.take("sync") && m.take("aligned") && m.type() == "u32";
    return known ? set_registers : nullptr;
}

Next move_predicate(Warp& w, const Instruction& i) {
    w.set_predicate(i[0], w.predicate(i[1]));
    return Next::kFollowing;
}

// Compilers copy registers and set constants between wgmma.fence and a product, which the assembler
// orders: a copy counts as fenced if its source does, and a constant always does.
void copy_fence_state(Warp& w, const Instruction& i) {
    const auto is_unfenced = [&](const Operand& o) {
        return o.kind == Operand::Kind::kRegister && w.unfenced[o.number];
    };
    bool unfenced = is_unfenced(i[1]);
    for (const Operand& element : i[1].elements) unfenced |= is_unfenced(element);
    if (i[0].kind == Operand::Kind::kRegister) w.unfenced[i[0].number] = unfenced;
    for (const Operand& element : i[0].elements) {
        if (element.kind == Operand::Kind::kRegister) w.unfenced[element.number] = unfenced;
    }
}

template <class U>
Next move(Warp& w, const Instruction& i) {
    const Operand& source = i[1];
    if (source.kind == Operand::Kind::kReal) {
        if constexpr (sizeof(U) == 8) w.set_values<double, 1>(i[0], w.values<double, 1>(source));
        if constexpr (sizeof(U) == 4) w.set_values<float, 1>(i[0], w.values<float, 1>(source));
    } else if (source.kind == Operand::Kind::kVector) {  // packs elements, lowest first
        const size_t n = source.elements.size(), width = 8 * sizeof(U) / n;
        Lanes<uint64_t> out{};
        for (size_t e = 0; e < n; ++e) {
            const auto part = w.bits<uint64_t>(source.elements[e]);
            for (int l = 0; l < kLanes; ++l) {
                const uint64_t ones = width == 64 ? ~0ull : (1ull << width) - 1;
                out[l] |= (part[l] & ones) << (e * width);
            }
        }
        w.set(i[0], out);
    } else if (i[0].kind == Operand::Kind::kVector) {
        const auto whole = w.bits<uint64_t>(source);
        const size_t n = i[0].elements.size(), width = 8 * sizeof(U) / n;
        for (size_t e = 0; e < n; ++e) {
            Lanes<uint64_t> part;
            for (int l = 0; l < kLanes; ++l) {
                const uint64_t ones = width == 64 ? ~0ull : (1ull << width) - 1;
                part[l] = whole[l] >> (e * width) & ones;
            }
            w.set(i[0].elements[e], part);
        }
    } else if (source.kind == Operand::Kind::kAddress) {
        w.set(i[0], w.addresses(source));
    } else {
        w.set(i[0], w.bits<U>(source));
    }
    copy_fence_state(w, i);
    return Next::kFollowing;
}

Execute decode_mov(Modifiers& m, Instruction&) {
    const std::string type = m.type();
    if (type == "pred") return move_predicate;
    switch (bytes_of(type)) {
        case 1:
        case 2: return move<uint16_t>;
        case 4: return move<uint32_t>;
        case 8: return move<uint64_t>;
        default: return nullptr;
    }
}

template <class U>
Next select(Warp& w, const Instruction& i) {
    const Mask chosen = w.predicate(i[3]);
    const Mask unknown = w.unknown;
    const auto yes = w.bits<U>(i[1]);
    const Mask unknown_yes = std::exchange(w.unknown, 0);
    const auto no = w.bits<U>(i[2]);
    w.unknown = unknown | (unknown_yes & chosen) | (w.unknown & ~chosen);
    Lanes<U> out;
    for (int l = 0; l < kLanes; ++l) out[l] = chosen >> l & 1 ? yes[l] : no[l];
    w.set(i[0], out);
    return Next::kFollowing;
}

Execute decode_selp(Modifiers& m, Instruction&) {
    switch (bytes_of(m.type())) {
        case 2: return select<uint16_t>;
        case 4: return select<uint32_t>;
        case 8: return select<uint64_t>;
        default: return nullptr;
    }
}

enum class Compare { kEq, kNe, kLt, kLe, kGt, kGe, kNumbers, kNotNumbers };

template <class T>
bool holds(Compare c, T a, T b) {
    switch (c) {
        case Compare::kEq: return a == b;
        case Compare::kNe: return a != b;
        case Compare::kLt: return a < b;
        case Compare::kLe: return a <= b;
        case Compare::kGt: return a > b;
        case Compare::kGe: return a >= b;
        default: return c == Compare::kNumbers;
    }
}

template <class T>
Mask compared(Warp& w, const Instruction& i) {
    const auto a = w.values<T, 1>(i[1]), b = w.values<T, 1>(i[2]);
    const auto compare = static_cast<Compare>(i.setting[0]);
    Mask out = 0;
    for (int l = 0; l < kLanes; ++l) {
        bool is_true;
        if constexpr (kIsFloat<T>) {
            const auto x = static_cast<Wider<T>>(flushed(a[l], i.flush));
            const auto y = static_cast<Wider<T>>(flushed(b[l], i.flush));
            const bool unordered = std::isnan(x) || std::isnan(y);
            is_true =
                unordered ? i.setting[1] || compare == Compare::kNotNumbers : holds(compare, x, y);
        } else {
            is_true = holds(compare, a[l], b[l]);
        }
        out |= static_cast<Mask>(is_true) << l;
    }
    return out;
}

Mask combined(const Instruction& i, Mask value, Mask other) {
    switch (i.setting[2]) {
        case 1: return value & other;
        case 2: return value | other;
        case 3: return value ^ other;
        default: return value;
    }
}

template <class T>
Next set_predicate(Warp& w, const Instruction& i) {
    const Mask value = compared<T>(w, i);
    const Mask other = i.setting[2] ? w.predicate(i[3]) : 0;
    const bool pair = i[0].kind == Operand::Kind::kPair;
    w.set_predicate(pair ? i[0].elements[0] : i[0], combined(i, value, other));
    if (pair) w.set_predicate(i[0].elements[1], combined(i, ~value, other));
    return Next::kFollowing;
}

// setting[0]: the comparison; [1]: whether it holds for NaN; [2]: how it is combined with a
// predicate.
Execute decode_setp(Modifiers& m, Instruction& i) {
    static const std::map<std::string, Compare> ordered = {
        {"eq", Compare::kEq}, {"ne", Compare::kNe},       {"lt", Compare::kLt},
        {"le", Compare::kLe}, {"gt", Compare::kGt},       {"ge", Compare::kGe},
        {"lo", Compare::kLt}, {"ls", Compare::kLe},       {"hi", Compare::kGt},
        {"hs", Compare::kGe}, {"num", Compare::kNumbers}, {"nan", Compare::kNotNumbers}};
    std::string name = m.pop_front();
    if (!ordered.contains(name) && name.ends_with("u")) {
        i.setting[1] = true;
        name.pop_back();
    }
    if (!ordered.contains(name)) return nullptr;
    i.setting[0] = static_cast<int64_t>(ordered.at(name));
    const std::string combination = m.take_any({"and", "or", "xor"});
    i.setting[2] = combination == "and"   ? 1
                   : combination == "or"  ? 2
                   : combination == "xor" ? 3
                                          : 0;
    i.flush = m.take("ftz");
    const std::string type = m.type();
    if (type == "f32") return set_predicate<float>;
    if (type == "f64") return set_predicate<double>;
    if (type == "f16") return set_predicate<Half>;
    if (type == "bf16") return set_predicate<Bfloat>;
    return for_integer(type, [](auto t) -> Execute { return set_predicate<decltype(t)>; });
}

Next test_space(Warp& w, const Instruction& i) {
    const auto address = w.bits<uint64_t>(i[1]);
    Mask out = 0;
    for (int l = 0; l < kLanes; ++l) {
        const bool shared = address[l] - kSharedWindow < kWindowSize;
        const bool local = address[l] - kLocalWindow < kWindowSize;
        const bool is_in = i.setting[0] == 0   ? shared
                           : i.setting[0] == 1 ? local
                                               : !shared && !local;
        out |= static_cast<Mask>(is_in) << l;
    }
    w.set_predicate(i[0], out);
    return Next::kFollowing;
}

// setting[0]: 0 for shared memory, 1 for local, 2 for global.
Execute decode_isspacep(Modifiers& m, Instruction& i) {
    const std::string space = m.type();
    i.setting[0] = space.starts_with("shared") ? 0 : space == "local" ? 1 : 2;
    return test_space;
}

}  // namespace

void add_control(Decoders& all) {
    all["bra"] = decode_bra;
    all["brx"] = decode_brx;
    all["ret"] = decode_exit;
    all["exit"] = decode_exit;
    all["trap"] = decode_trap;
    for (const char* name : {"prefetch", "prefetchu", "discard", "applypriority", "griddepcontrol",
                             "nanosleep", "pmevent", "brkpt", "createpolicy"}) {
        all[name] = decode_nothing;
    }
    all["setmaxnreg"] = decode_setmaxnreg;
    all["mov"] = decode_mov;
    all["selp"] = decode_selp;
    all["setp"] = decode_setp;
    all["isspacep"] = decode_isspacep;
}

}  // namespace ptx
