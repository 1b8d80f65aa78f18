// tcgen05.ld and tcgen05.st: between registers and the 32 lanes of tensor memory of a warp.
#include <utility>

#include "tcgen05.h"

namespace ptx {
namespace {

enum Shape { k32x32, k16x64, k16x128, k16x256, k16x32x2 };

// setting[0]: the shape; [1]: the number of repetitions; [2]: whether a register contains the lower
// halves of two columns.
struct Transfer {
    Shape shape;
    uint32_t repeat, halves;

    explicit Transfer(const Instruction& i)
        : shape(static_cast<Shape>(i.setting[0])),
          repeat(static_cast<uint32_t>(i.setting[1])),
          halves(i.setting[2] ? 2 : 1) {}

    uint32_t registers() const {
        return repeat * (shape == k16x128 ? 2 : shape == k16x256 ? 4 : 1);
    }
    uint32_t columns() const {
        static constexpr uint32_t kOnce[] = {1, 2, 4, 8, 1};
        return repeat * kOnce[shape] * halves;
    }
    // Lane and column of a register of a thread that contains a single column.
    std::pair<uint32_t, uint32_t> place(uint32_t thread, uint32_t r) const {
        switch (shape) {
            case k32x32: return {thread, r};
            case k16x64: return {thread / 4 + 8 * (thread % 2), thread / 2 % 2 + 2 * r};
            case k16x128: return {thread / 4 + 8 * (r % 2), thread % 4 + 4 * (r / 2)};
            case k16x256:
                return {thread / 4 + 8 * (r / 2 % 2), r % 2 + 2 * (thread % 4) + 8 * (r / 4)};
            default: return {thread % 16, r};
        }
    }
};

// The part of tensor memory that an instruction accesses.
class Window {
public:
    Window(Warp& w, const Instruction& i, const Operand& address, int64_t split)
        : warp_(w), transfer_(i), split_(static_cast<uint32_t>(split)), base_(first(w, address)) {
        const bool is_half = transfer_.shape != k32x32;
        const uint32_t own = static_cast<uint32_t>(w.index) % 4 * 32;
        if (base_.lane != own && !(is_half && base_.lane == own + 16)) {
            w.fault(kind::kOutOfBounds,
                    "lane " + std::to_string(base_.lane) +
                        " of tensor memory is not the first that the warp may access");
        }
    }

    template <class F>
    void for_each_region(F f) const {
        const auto group =
            static_cast<uint8_t>((transfer_.shape == k32x32 ? 3 : 1) << base_.lane / 16);
        f(TensorMemory::Region{base_.column, transfer_.columns(), group});
        if (transfer_.shape == k16x32x2) {
            f(TensorMemory::Region{base_.column + split_, transfer_.columns(), group});
        }
    }

    // The cell for a half of a register.
    uint32_t& cell(int thread, uint32_t r, uint32_t half) const {
        const auto [lane, column] = transfer_.place(static_cast<uint32_t>(thread), r);
        const uint32_t second = transfer_.shape == k16x32x2 && thread >= 16 ? split_ : 0;
        return warp_.block.tensor_memory.at(
            base_.lane + lane, base_.column + second + column * transfer_.halves + half);
    }

    void require_allocated() const {
        for_each_region([&](const TensorMemory::Region& region) {
            ptx::require_allocated(warp_, -1, region.column, region.columns);
        });
    }

private:
    static TensorAddress first(const Warp& w, const Operand& address) {
        const auto all = w.addresses(address);
        for (const uint64_t one : all) {
            if (one != all[0])
                w.fault(kind::kInvalid, "lanes have different tensor memory addresses");
        }
        return TensorAddress(all[0]);
    }

    Warp& warp_;
    Transfer transfer_;
    uint32_t split_;
    TensorAddress base_;
};

Access access_by(const Warp& w, uint32_t agent, uint32_t time) {
    Access access{&w.known, {agent, time}};
    access.line = w.block.cluster.launch.program.code[static_cast<size_t>(w.pc())].line;
    return access;
}

std::vector<const Operand*> registers_of(const Warp& w, const Operand& o,
                                         const Transfer& transfer) {
    std::vector<const Operand*> all;
    if (o.kind != Operand::Kind::kVector) all.push_back(&o);
    for (const Operand& one : o.elements) all.push_back(&one);
    if (all.size() != transfer.registers()) {
        w.fault(kind::kInvalid, "the number of registers does not match the shape");
    }
    return all;
}

// Uninitialized memory may be loaded, and is NaN: pipelined loops load the sums of a product that
// was not started, and ignore them.
void read_column(Warp& w, const TensorMemory::Region& column, const Access& access) {
    const auto found = w.block.tensor_memory.read(column, access);
    if (found && found->kind != std::string_view(kind::kUninitialized)) w.require(found, -1, 0);
}

Next load(Warp& w, const Instruction& i) {
    const Transfer transfer(i);
    const Window window(w, i, i[1], i.size() > 2 ? i[2].value : 0);
    window.require_allocated();
    const Access access =
        access_by(w, w.block.agent_of_tensor_loads(w.index), ++w.tensor_load_time);
    window.for_each_region([&](const TensorMemory::Region& region) {
        for (uint32_t n = 0; n < region.columns; ++n) {
            read_column(w, {region.column + n, 1, region.groups}, access);
        }
    });
    const auto registers = registers_of(w, i[0], transfer);
    for (uint32_t r = 0; r < registers.size(); ++r) {
        Lanes<uint32_t> values{};
        for (int l = 0; l < kLanes; ++l) {
            values[l] = window.cell(l, r, 0);
            if (transfer.halves == 2) values[l] = (values[l] & 0xFFFF) | window.cell(l, r, 1) << 16;
        }
        w.set(*registers[r], values);
    }
    return Next::kFollowing;
}

Next store(Warp& w, const Instruction& i) {
    const Transfer transfer(i);
    const Window window(w, i, i[0], i.size() > 2 ? i[1].value : 0);
    window.require_allocated();
    const Access access =
        access_by(w, w.block.agent_of_tensor_stores(w.index), ++w.tensor_store_time);
    window.for_each_region([&](const TensorMemory::Region& region) {
        w.require(w.block.tensor_memory.write(region, access), -1, 0);
    });
    const auto registers = registers_of(w, i[i.size() - 1], transfer);
    for (uint32_t r = 0; r < registers.size(); ++r) {
        const auto values = w.bits<uint32_t>(*registers[r]);
        for (int l = 0; l < kLanes; ++l) {
            window.cell(l, r, 0) = transfer.halves == 2 ? values[l] & 0xFFFF : values[l];
            if (transfer.halves == 2) window.cell(l, r, 1) = values[l] >> 16;
        }
    }
    return Next::kFollowing;
}

bool take_transfer(Modifiers& m, Instruction& i, const char* packing) {
    static const std::map<std::string, Shape> shapes = {{"32x32b", k32x32},
                                                        {"16x64b", k16x64},
                                                        {"16x128b", k16x128},
                                                        {"16x256b", k16x256},
                                                        {"16x32bx2", k16x32x2}};
    const auto shape = shapes.find(m.pop_front());
    const std::string repeat = m.pop_front();
    if (shape == shapes.end() || !repeat.starts_with("x")) return false;
    i.setting[0] = shape->second;
    i.setting[1] = std::stoi(repeat.substr(1));
    i.setting[2] = m.take(packing);
    return true;
}

}  // namespace

// Loaded registers may be used before the wait: the specification requires it, but Triton's code
// relies on assemblers, which track registers. The wait orders the read of tensor memory before
// later writes.
Next wait_for_tensor_loads(Warp& w, const Instruction&) {
    w.known.seen.set(w.block.agent_of_tensor_loads(w.index), w.tensor_load_time);
    return Next::kFollowing;
}

Next wait_for_tensor_stores(Warp& w, const Instruction&) {
    w.known.seen.set(w.block.agent_of_tensor_stores(w.index), w.tensor_store_time);
    return Next::kFollowing;
}

Execute decode_tensor_load(Modifiers& m, Instruction& i) {
    return take_transfer(m, i, "pack::16b") ? load : nullptr;
}

Execute decode_tensor_store(Modifiers& m, Instruction& i) {
    return take_transfer(m, i, "unpack::16b") ? store : nullptr;
}

}  // namespace ptx
