#include "program.h"

#include <algorithm>
#include <set>

#include "machine.h"

namespace ptx {
namespace {

Next unsupported(Warp& w, const Instruction& i) {
    w.fault(kind::kUnsupported, "instruction " + i.name() + " is not supported");
}

template <class F>
void for_registers(const Operand& o, F f) {
    if (o.kind == Operand::Kind::kRegister) f(o);
    for (const Operand& element : o.elements) for_registers(element, f);
}

}  // namespace

std::string Instruction::name() const {
    std::string text;
    for (const std::string& part : opcode) text += (text.empty() ? "" : ".") + part;
    return text;
}

bool Modifiers::take(const std::string& name) {
    const auto found = std::find(rest_.begin(), rest_.end(), name);
    if (found == rest_.end()) return false;
    rest_.erase(found);
    return true;
}

bool Modifiers::has(const std::string& name) const {
    return std::find(rest_.begin(), rest_.end(), name) != rest_.end();
}

std::string Modifiers::take_any(std::initializer_list<const char*> names) {
    for (const char* name : names) {
        if (take(name)) return name;
    }
    return "";
}

void Modifiers::skip_hints() {
    std::erase_if(rest_, [](const std::string& part) {
        static const std::set<std::string> hints = {
            "weak", "relaxed", "acquire", "release", "acq_rel", "sc", "gpu",
            "cta",  "sys",     "cluster", "nc",      "ca",      "cg", "cs",
            "lu",   "cv",      "wb",      "wt",      "volatile"};
        return hints.contains(part) || part.starts_with("L1::") || part.starts_with("L2::");
    });
}

std::string Modifiers::type() {
    if (rest_.empty()) return "";
    std::string last = rest_.back();
    rest_.pop_back();
    return last;
}

std::string Modifiers::pop_front() {
    if (rest_.empty()) return "";
    std::string first = rest_.front();
    rest_.erase(rest_.begin());
    return first;
}

int bytes_of(const std::string& type) {
    if (type == "pred") return 0;
    for (const char* suffix : {"8", "16", "32", "64", "128"}) {
        if (type.size() == 1 + std::string(suffix).size() && type.ends_with(suffix)) {
            return std::stoi(suffix) / 8;
        }
    }
    if (type == "bf16") return 2;
    if (type == "f16x2" || type == "bf16x2" || type == "tf32") return 4;
    return 0;
}

const Decoders& decoders() {
    static const Decoders all = [] {
        Decoders made;
        for (auto add :
             {add_arithmetic, add_extremes, add_bitwise, add_conversions, add_approximations,
              add_memory, add_atomics, add_control, add_barriers, add_warp_exchanges,
              add_async_copies, add_bulk_copies, add_tensor_map_updates, add_clusters,
              add_matrix_loads, add_mma, add_wgmma, add_tcgen05}) {
            add(made);
        }
        return made;
    }();
    return all;
}

void Program::add(Instruction i) {
    static const std::set<std::string> computing = {
        "abs",  "add", "and", "bfe", "bfi",  "bmsk", "brev", "clz",  "copysign", "cos",
        "cvt",  "div", "ex2", "fma", "lg2",  "lop3", "mad",  "max",  "min",      "mov",
        "mul",  "neg", "not", "or",  "popc", "prmt", "rcp",  "rem",  "rsqrt",    "selp",
        "setp", "shf", "shl", "shr", "sin",  "sqrt", "sub",  "tanh", "xor"};
    i.passes_unknown = computing.contains(i.opcode[0]);
    const auto decoder = decoders().find(i.opcode[0]);
    if (decoder != decoders().end()) {
        Modifiers modifiers(i.opcode);
        i.execute = decoder->second(modifiers, i);
        if (!modifiers.empty()) i.execute = nullptr;
    }
    if (!i.execute) i.execute = unsupported;
    for (const Operand& o : i.operands) {
        for_registers(o, [&](const Operand& r) { i.registers.push_back(r.number); });
    }
    code.push_back(std::move(i));
}

void Program::finish() {
    std::set<uint16_t> of_products;
    for (const Instruction& i : code) {
        if (i.is_product) of_products.insert(i.registers.begin(), i.registers.end());
    }
    for (Instruction& i : code) {
        i.uses_wgmma_registers = std::any_of(i.registers.begin(), i.registers.end(),
                                             [&](uint16_t r) { return of_products.contains(r); });
    }
    find_never_written();
    find_smallest_store();
}

void Program::find_smallest_store() {
    for (const Instruction& i : code) {
        const auto has = [&](const char* part) {
            return std::find(i.opcode.begin(), i.opcode.end(), part) != i.opcode.end();
        };
        if (i.opcode[0] == "cp" && has("bulk")) global_granule_shift = 0;
        const bool writes = i.opcode[0] == "st" || i.opcode[0] == "atom" || i.opcode[0] == "red";
        if (!writes || has("shared") || has("local")) continue;
        const int elements = has("v2") ? 2 : has("v4") ? 4 : has("v8") ? 8 : 1;
        const auto bytes = static_cast<unsigned>(elements * bytes_of(i.opcode.back()));
        if (bytes) global_granule_shift = std::min(global_granule_shift, std::countr_zero(bytes));
    }
}

void Program::find_never_written() {
    std::map<uint16_t, Operand> registers;
    for (const Instruction& i : code) {
        for (const Operand& o : i.operands) {
            for_registers(o, [&](const Operand& r) { registers.emplace(r.number, r); });
        }
    }
    for (const Instruction& i : code) {
        if (i.operands.empty() || i[0].kind == Operand::Kind::kAddress) continue;
        for_registers(i[0], [&](const Operand& r) { registers.erase(r.number); });
    }
    for (const auto& [number, r] : registers) never_written.push_back(r);
}

}  // namespace ptx
