// wgmma: asynchronous products of four warps, with operands in shared memory or registers.
#include <utility>

#include "accesses.h"
#include "matrix.h"

namespace ptx {
namespace {

// setting[0], [1]: element types of a and b; [2]: type of sums; [3]: columns; [4]: depth.
struct Shape {
    Element a, b;
    Sum sum;
    int columns, depth;

    explicit Shape(const Instruction& i)
        : a(static_cast<Element>(i.setting[0])),
          b(static_cast<Element>(i.setting[1])),
          sum(static_cast<Sum>(i.setting[2])),
          columns(static_cast<int>(i.setting[3])),
          depth(static_cast<int>(i.setting[4])) {}
};

int immediate(const Instruction& i, size_t n, int otherwise) {
    return i.size() > n ? static_cast<int>(i[n].value) : otherwise;
}

Descriptor decoded(const Warp& w, uint64_t bits) {
    static constexpr int kSwizzles[] = {0, 128, 64, 32};
    Descriptor d;
    d.start = static_cast<uint32_t>(bits & 0x3FFF) << 4;
    d.leading = static_cast<uint32_t>(bits >> 16 & 0x3FFF) << 4;
    d.stride = static_cast<uint32_t>(bits >> 32 & 0x3FFF) << 4;
    d.base_offset = static_cast<int>(bits >> 49 & 7);
    d.swizzle = kSwizzles[bits >> 62];
    if (!d.swizzle) d.base_offset = 0;  // ignored without a swizzle
    if (bits >> 14 & 3 || bits >> 30 & 3)
        w.fault(kind::kInvalid, "reserved bits of a matrix descriptor");
    return d;
}

std::vector<uint16_t> numbers(const Operand& o) {
    std::vector<uint16_t> all;
    for (const Operand& one : o.elements) all.push_back(one.number);
    return all;
}

void check_fences(const Warp& w, const std::vector<uint16_t>& accumulators,
                  const std::vector<uint16_t>& fragments) {
    for (const auto& registers : {accumulators, fragments}) {
        for (uint16_t r : registers) {
            if (w.unfenced[r]) {
                w.fault(kind::kRace,
                        "a register of a wgmma was written without a wgmma.fence afterwards");
            }
        }
    }
    for (uint16_t r : accumulators) {
        if (w.feeding[r])
            w.fault(kind::kInFlight, "a wgmma overwrites a fragment that another reads");
    }
    for (uint16_t r : fragments) {
        if (w.accumulating[r])
            w.fault(kind::kInFlight, "a wgmma reads what another still accumulates");
    }
}

// Reads the operands of the product, so that faults contain the warp and the lane.
void check_defined(const Warp& w, const Instruction& i, bool accumulates) {
    for (const Operand& o : i[1].elements) w.bits<uint32_t>(o);
    if (!accumulates) return;
    for (const Operand& o : i[0].elements) {
        if (!w.accumulating[o.number]) w.bits<uint32_t>(o);  // otherwise it will be defined
    }
}

// Computes the product for the four warps from the current registers and shared memory.
void compute(Block& block, int group, const Instruction& i, const Descriptor* a_described,
             const Descriptor& b_described, bool accumulates) {
    const Shape shape(i);
    Warp& leader = block.warps[static_cast<size_t>(4 * group)];
    Matrix a(64, shape.depth);
    if (a_described) {
        a = load_described(leader, *a_described, 64, shape.depth, shape.a, immediate(i, 6, 0));
    }
    const size_t trans_b = a_described ? 7 : 6;
    const Matrix b = load_described(leader, b_described, shape.columns, shape.depth, shape.b,
                                    immediate(i, trans_b, 0));
    for (int n = 0; n < 4; ++n) {
        Warp& w = block.warps[static_cast<size_t>(4 * group + n)];
        const Mask active = std::exchange(w.active, kAllLanes);
        if (!a_described) load_fragment_a(w, i[1].elements, shape.a, a, 16 * n);
        w.active = active;
    }
    auto sums = product(a, b);
    const int sign = immediate(i, 4, 1) * immediate(i, 5, 1);
    if (sign < 0) {
        for (double& sum : sums) sum = -sum;
    }
    for (int n = 0; n < 4; ++n) {
        Warp& w = block.warps[static_cast<size_t>(4 * group + n)];
        const Mask active = std::exchange(w.active, kAllLanes);
        const auto& d = i[0].elements;
        accumulate(w, d, accumulates ? &d : nullptr, shape.sum, sums, 16 * n, shape.columns);
        for (const Operand& one : d) w.unfenced[one.number] = false;
        w.active = active;
    }
}

Next multiply(Warp& w, const Instruction& i) {
    Block& block = w.block;
    const int group = w.index / 4;
    WarpGroup& warps = block.warp_groups[static_cast<size_t>(group)];
    if (w.fragment->wait.kind == Wait::Kind::kWarpGroup) return Next::kFollowing;

    const auto accumulators = numbers(i[0]), fragments = numbers(i[1]);
    check_fences(w, accumulators, fragments);
    const bool in_registers = i[1].kind == Operand::Kind::kVector;
    const bool accumulates = w.predicate(i[3]) & w.active;
    check_defined(w, i, accumulates);
    const uint64_t a_bits = in_registers ? 0 : w.uniform<uint64_t>(i[1]),
                   b_bits = w.uniform<uint64_t>(i[2]);
    const uint32_t time = w.products_committed + 1;
    w.products.push_back({time, accumulators, fragments});
    for (uint16_t r : accumulators) ++w.accumulating[r];
    for (uint16_t r : fragments) ++w.feeding[r];

    const std::array<uint64_t, 3> agreed{a_bits, b_bits, accumulates};
    if (warps.arrived == 0) {
        warps.pc = w.pc();
        warps.known = w.known;
        warps.agreed = agreed;
    } else if (warps.pc != w.pc()) {
        w.fault(kind::kDivergence, "warps of a warp group are at different instructions");
    } else if (warps.agreed != agreed) {
        w.fault(kind::kInvalid, "warps of a warp group differ in a descriptor or in scale-d");
    } else {
        warps.known.meet(w.known);
    }
    if (++warps.arrived < 4)
        return w.suspend(Wait::Kind::kWarpGroup, static_cast<uint64_t>(group), warps.phase);
    warps.arrived = 0;
    warps.phase += 1;

    Access access{&warps.known, {block.agent_of_products(group), time}};
    access.is_async = true;
    access.line = i.line;
    const Descriptor a = decoded(w, a_bits), b = decoded(w, b_bits);
    // Reads are recorded when the product is issued: later writes of others are races.
    const Shape shape(i);
    if (!in_registers) record_described(w, a, 64, shape.depth, shape.a, immediate(i, 6, 0), access);
    record_described(w, b, shape.columns, shape.depth, shape.b,
                     immediate(i, in_registers ? 6 : 7, 0), access);
    const auto land = [&block, &i, group, in_registers, a, b, accumulates] {
        compute(block, group, i, in_registers ? nullptr : &a, b, accumulates);
    };
    // Products are executed in order, so one lands early only if none before it is pending.
    if (warps.products.empty() && block.cluster.launch.lands_early()) {
        land();
    } else {
        warps.products.push_back({access.epoch.agent, time, land});
    }
    return Next::kFollowing;
}

Next fence(Warp& w, const Instruction&) {
    std::fill(w.unfenced.begin(), w.unfenced.end(), 0);
    return Next::kFollowing;
}

Next commit(Warp& w, const Instruction&) {
    w.products_committed += 1;
    return Next::kFollowing;
}

Next wait(Warp& w, const Instruction& i) {
    const auto pending = static_cast<uint32_t>(i[0].value);
    const uint32_t time = w.products_committed > pending ? w.products_committed - pending : 0;
    const int group = w.index / 4;
    auto& queue = w.block.warp_groups[static_cast<size_t>(group)].products;
    while (!queue.empty() && queue.front().time <= time) {
        const Pending product = std::move(queue.front());
        queue.pop_front();
        product.land();
    }
    while (!w.products.empty() && w.products.front().time <= time) {
        for (uint16_t r : w.products.front().accumulators) --w.accumulating[r];
        for (uint16_t r : w.products.front().fragments) --w.feeding[r];
        w.products.pop_front();
    }
    w.known.seen.set(w.block.agent_of_products(group), time);
    return Next::kFollowing;
}

Execute decode_wgmma(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    const std::string operation = m.pop_front();
    i.is_aligned = m.take("sync") && m.take("aligned");
    if (operation == "fence") return fence;
    if (operation == "commit_group") return commit;
    if (operation == "wait_group") return wait;
    if (operation != "mma_async") return nullptr;
    const std::string shape = m.pop_front();
    if (!shape.starts_with("m64n")) return nullptr;
    const size_t k = shape.find('k');
    const std::string b = m.type(), a = m.type(), d = m.type();
    i.setting = {static_cast<int64_t>(element_of(a)), static_cast<int64_t>(element_of(b)),
                 static_cast<int64_t>(sum_of(d)), std::stoi(shape.substr(4, k - 4)),
                 std::stoi(shape.substr(k + 1))};
    i.is_product = true;
    const bool known = element_of(a) != Element::kUnknown && element_of(b) != Element::kUnknown &&
                       sum_of(d) != Sum::kUnknown;
    return known ? multiply : nullptr;
}

}  // namespace

void add_wgmma(Decoders& all) { all["wgmma"] = decode_wgmma; }

}  // namespace ptx
