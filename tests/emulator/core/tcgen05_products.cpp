// tcgen05.mma: products with sums in tensor memory, and tcgen05.commit, which signals their
// completion to an mbarrier.
#include "bulk.h"
#include "matrix.h"
#include "tcgen05.h"

namespace ptx {
namespace {

enum Kind { kF16, kTf32, kF8 };

// The 32 bits that describe a product; setting[0] is its kind.
struct Shape {
    Element a, b;
    bool a_transposed, b_transposed, is_negative;
    int rows, columns, depth;

    Shape(const Warp& w, const Instruction& i, uint32_t bits) {
        const auto kind = static_cast<Kind>(i.setting[0]);
        a = element(kind, bits >> 7 & 7);
        b = element(kind, bits >> 10 & 7);
        is_negative = (bits >> 13 & 1) != (bits >> 14 & 1);
        a_transposed = bits >> 15 & 1;
        b_transposed = bits >> 16 & 1;
        columns = static_cast<int>(bits >> 17 & 63) * 8;
        rows = static_cast<int>(bits >> 24 & 31) * 16;
        depth = 32 / bytes_of(a);
        if (a == Element::kUnknown || b == Element::kUnknown || (bits >> 4 & 3) != kSumIsFloat ||
            bits & kNotDense || bits >> 30) {
            w.fault(kind::kUnsupported, "tcgen05.mma with such an instruction descriptor");
        }
        const int step = rows == 64 ? 8 : 16;
        if ((rows != 64 && rows != 128) || columns == 0 || columns > 256 || columns % step) {
            w.fault(kind::kInvalid, "tcgen05.mma has no product of " + std::to_string(rows) +
                                        " rows and " + std::to_string(columns) + " columns");
        }
    }

    // The lane of tensor memory of a row, relative to the first.
    uint32_t lane(int row) const {
        return static_cast<uint32_t>(rows == 64 ? row / 16 * 32 + row % 16 : row);
    }
    // The groups of 16 lanes in use.
    uint8_t groups(uint32_t first_lane) const {
        return static_cast<uint8_t>(rows == 64 ? 0x55 << first_lane / 16 : 0xFF);
    }

private:
    static constexpr uint32_t kSumIsFloat = 1, kNotDense = 0xF;

    static Element element(Kind kind, uint32_t code) {
        if (kind == kTf32) return code == 2 ? Element::kTf32 : Element::kUnknown;
        if (code > 1) return Element::kUnknown;
        if (kind == kF16) return code ? Element::kBfloat : Element::kHalf;
        return code ? Element::kE5M2 : Element::kE4M3;
    }
};

Descriptor decoded(const Warp& w, uint64_t bits) {
    static const std::map<uint64_t, int> swizzles = {{0, 0}, {2, 128}, {4, 64}, {6, 32}};
    const auto swizzle = swizzles.find(bits >> 61);
    const bool is_version_1 = (bits >> 46 & 3) == 1, has_absolute_offset = bits >> 52 & 1;
    if (swizzle == swizzles.end() || has_absolute_offset) {
        w.fault(kind::kUnsupported, "matrix descriptor of this layout");
    }
    if (!is_version_1)
        w.fault(kind::kInvalid, "the version of a matrix descriptor of tcgen05 is not 1");
    Descriptor d;
    d.start = static_cast<uint32_t>(bits & 0x3FFF) << 4;
    d.leading = static_cast<uint32_t>(bits >> 16 & 0x3FFF) << 4;
    d.stride = static_cast<uint32_t>(bits >> 32 & 0x3FFF) << 4;
    d.base_offset = static_cast<int>(bits >> 49 & 7);
    d.swizzle = swizzle->second;
    return d;
}

// The first operand if it is in tensor memory, with several elements per column.
Matrix in_tensor_memory(TensorMemory& memory, const TensorAddress& from, const Shape& p) {
    Matrix out(p.rows, p.depth);
    const int bytes = bytes_of(p.a), per_column = 4 / bytes;
    const uint32_t ones = bytes == 4 ? ~0u : (1u << (8 * bytes)) - 1;
    for (int row = 0; row < p.rows; ++row) {
        for (int k = 0; k < p.depth; ++k) {
            const auto column = from.column + static_cast<uint32_t>(k / per_column);
            const uint32_t bits = memory.at(from.lane + p.lane(row), column);
            out.at(row, k) = value_of(p.a, bits >> (8 * bytes * (k % per_column)) & ones);
        }
    }
    return out;
}

void add_to(TensorMemory& memory, const TensorAddress& to, const Shape& p, bool accumulates,
            const std::vector<double>& sums) {
    for (int row = 0; row < p.rows; ++row) {
        for (int column = 0; column < p.columns; ++column) {
            uint32_t& cell =
                memory.at(to.lane + p.lane(row), to.column + static_cast<uint32_t>(column));
            double sum = sums[static_cast<size_t>(row * p.columns + column)];
            if (p.is_negative) sum = -sum;
            if (accumulates) sum += std::bit_cast<float>(cell);
            cell = std::bit_cast<uint32_t>(canonical(static_cast<float>(sum)));
        }
    }
}

// Work of the tensor cores, executed in the order in which a warp issued it.
void enqueue(Warp& w, std::function<void()> work) {
    Block& block = w.block;
    if (w.tensor_work.empty() && block.cluster.launch.lands_early()) return work();
    w.tensor_work.push_back(std::move(work));
    block.copies.push_back({block.agent_of_tensor_cores(w.index), 0, [&w] {
                                const auto first = std::move(w.tensor_work.front());
                                w.tensor_work.pop_front();
                                first();
                            }});
}

void require_lanes(const Warp& w, int lane, const TensorAddress& address, const Shape& p) {
    if (address.lane != 0 && !(p.rows == 64 && address.lane == 16)) {
        w.fault(kind::kInvalid, "a product of tensor memory begins at lane 0, or 16 for 64 rows",
                lane);
    }
}

void multiply_in_lane(Warp& w, const Instruction& i, int lane) {
    const Shape p(w, i, w.bits<uint32_t>(i[3])[lane]);
    const TensorAddress d(w.addresses(i[0])[lane]);
    const bool accumulates = w.predicate(i[4]) >> lane & 1;
    TensorMemory& memory = w.block.tensor_memory;
    require_lanes(w, lane, d, p);
    require_allocated(w, lane, d.column, static_cast<uint32_t>(p.columns));

    // A product reads before it writes.
    w.tensor_core_time += 2;
    Access reads{&w.known, {w.block.agent_of_tensor_cores(w.index), w.tensor_core_time - 1}};
    reads.line = i.line;
    reads.lanes_ordered = reads.epoch;
    Access writes = reads;
    writes.epoch.time += 1;
    writes.lanes_ordered = writes.epoch;
    Access shared_reads = reads;
    shared_reads.is_async = true;

    std::function<Matrix()> load_a;
    if (i[1].kind == Operand::Kind::kAddress) {
        const TensorAddress from(w.addresses(i[1])[lane]);
        const auto columns = static_cast<uint32_t>(p.depth * bytes_of(p.a) / 4);
        require_lanes(w, lane, from, p);
        require_allocated(w, lane, from.column, columns);
        w.require(memory.read({from.column, columns, p.groups(from.lane)}, reads), lane, 0);
        load_a = [&memory, from, p] { return in_tensor_memory(memory, from, p); };
    } else {
        const Descriptor from = decoded(w, w.bits<uint64_t>(i[1])[lane]);
        record_described(w, from, p.rows, p.depth, p.a, p.a_transposed, shared_reads);
        load_a = [&w, from, p] {
            return load_described(w, from, p.rows, p.depth, p.a, p.a_transposed);
        };
    }
    const Descriptor b = decoded(w, w.bits<uint64_t>(i[2])[lane]);
    record_described(w, b, p.columns, p.depth, p.b, p.b_transposed, shared_reads);
    const TensorMemory::Region sums{d.column, static_cast<uint32_t>(p.columns), p.groups(d.lane)};
    if (accumulates) w.require(memory.read(sums, reads), lane, 0);
    w.require(memory.write(sums, writes), lane, 0);
    enqueue(w, [&w, &memory, load_a, b, p, d, accumulates] {
        const Matrix second = load_described(w, b, p.columns, p.depth, p.b, p.b_transposed);
        add_to(memory, d, p, accumulates, product(load_a(), second));
    });
}

Next multiply(Warp& w, const Instruction& i) {
    if (i.size() != 5 || i[4].kind == Operand::Kind::kVector) {
        w.fault(kind::kUnsupported, "tcgen05.mma that masks lanes or scales its sums");
    }
    for (int l = 0; l < kLanes; ++l) {
        if (w.active >> l & 1) multiply_in_lane(w, i, l);
    }
    return Next::kFollowing;
}

// setting[0]: whether several blocks are signalled.
Next commit(Warp& w, const Instruction& i) {
    const auto addresses = w.addresses(i[0]);
    const auto masks = i.setting[0] ? w.bits<uint32_t>(i[1]) : filled(0u);
    Knowledge known = w.known;
    known.seen.set(w.block.agent_of_tensor_cores(w.index), w.tensor_core_time);
    w.advance();
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        const uint64_t address = shared_address(addresses[l]);
        for (uint32_t rank : targets(w, l, address, i.setting[0], masks[l])) {
            MBarrier& barrier = mbarrier_at(w, l, in_block(address, rank));
            Block& owner = *w.block.cluster.blocks[rank];
            barrier.in_flight += 1;
            enqueue(w, [&w, &owner, &barrier, known, pc = w.pc()] {
                barrier.in_flight -= 1;
                if (!barrier.pending) {
                    w.fault_at(pc, kind::kInvalid, "more arrivals than the mbarrier expects");
                }
                owner.arrive(barrier, known, 1);
            });
        }
    }
    return Next::kFollowing;
}

}  // namespace

Execute decode_tensor_product(Modifiers& m, Instruction& i) {
    const std::string kind = m.pop_front();
    if (kind != "kind::f16" && kind != "kind::tf32" && kind != "kind::f8f6f4") return nullptr;
    i.setting[0] = kind == "kind::f16" ? kF16 : kind == "kind::tf32" ? kTf32 : kF8;
    if (m.front().starts_with("collector::a")) m.pop_front();  // the buffer of an operand
    return multiply;
}

Execute decode_tensor_commit(Modifiers& m, Instruction& i) {
    m.take("shared::cluster");
    i.setting[0] = m.take("multicast::cluster");
    return m.take("mbarrier::arrive::one") && m.take("b64") ? commit : nullptr;
}

}  // namespace ptx
