// mma.sync: products of fragments in the registers of a warp.
#include "matrix.h"

namespace ptx {
namespace {

// setting[0], [1]: element types of a and b; [2]: type of sums; [3]: depth.
Next multiply(Warp& w, const Instruction& i) {
    const auto a_type = static_cast<Element>(i.setting[0]),
               b_type = static_cast<Element>(i.setting[1]);
    const auto depth = static_cast<int>(i.setting[3]);
    Matrix a(16, depth), b(8, depth);
    load_fragment_a(w, i[1].elements, a_type, a, 0);
    load_fragment_b(w, i[2].elements, b_type, b);
    accumulate(w, i[0].elements, &i[3].elements, static_cast<Sum>(i.setting[2]), product(a, b), 0,
               8);
    return Next::kFollowing;
}

Execute decode_mma(Modifiers& m, Instruction& i) {
    if (!m.take("sync")) return nullptr;
    i.is_aligned = m.take("aligned");
    const std::string shape = m.pop_front();
    if (!shape.starts_with("m16n8k") || !m.take("row") || !m.take("col")) return nullptr;
    i.setting[3] = std::stoi(shape.substr(6));
    const std::string c = m.type(), b = m.type(), a = m.type(), d = m.type();
    i.setting[0] = static_cast<int64_t>(element_of(a));
    i.setting[1] = static_cast<int64_t>(element_of(b));
    i.setting[2] = static_cast<int64_t>(sum_of(d));
    const auto registers = static_cast<size_t>(i.setting[3] * bytes_of(element_of(a)) / 8);
    const bool fits = i[1].elements.size() == registers && i[2].elements.size() * 2 == registers;
    const bool known = element_of(a) != Element::kUnknown && element_of(b) != Element::kUnknown &&
                       sum_of(d) != Sum::kUnknown && c == d && fits;
    return known ? multiply : nullptr;
}

}  // namespace

void add_mma(Decoders& all) { all["mma"] = decode_mma; }

}  // namespace ptx
