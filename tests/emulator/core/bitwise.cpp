// Logic, shifts, and bit fields.
#include "machine.h"

namespace ptx {
namespace {

struct And {
    template <class T>
    T operator()(T a, T b) const {
        return a & b;
    }
};
struct Or {
    template <class T>
    T operator()(T a, T b) const {
        return a | b;
    }
};
struct Xor {
    template <class T>
    T operator()(T a, T b) const {
        return a ^ b;
    }
};

template <class F>
Next predicate_logic(Warp& w, const Instruction& i) {
    w.set_predicate(i[0], F{}(w.predicate(i[1]), w.predicate(i[2])));
    return Next::kFollowing;
}

template <class U, class F>
Next logic(Warp& w, const Instruction& i) {
    auto a = w.bits<U>(i[1]);
    const auto b = w.bits<U>(i[2]);
    for (int l = 0; l < kLanes; ++l) a[l] = static_cast<U>(F{}(a[l], b[l]));
    w.set(i[0], a);
    return Next::kFollowing;
}

template <class F>
Execute decode_logic(Modifiers& m, Instruction&) {
    const std::string type = m.type();
    if (type == "pred") return predicate_logic<F>;
    return for_integer(type, [](auto t) -> Execute { return logic<decltype(t), F>; });
}

Next predicate_not(Warp& w, const Instruction& i) {
    w.set_predicate(i[0], ~w.predicate(i[1]));
    return Next::kFollowing;
}

// A function of one operand's bits; R is the type of the result.
template <class U, class R, R (*F)(U)>
Next unary(Warp& w, const Instruction& i) {
    const auto a = w.bits<U>(i[1]);
    Lanes<R> out;
    for (int l = 0; l < kLanes; ++l) out[l] = F(a[l]);
    w.set(i[0], out);
    return Next::kFollowing;
}

template <class U>
U complement(U x) {
    return static_cast<U>(~x);
}
template <class U>
uint32_t ones(U x) {
    return static_cast<uint32_t>(std::popcount(x));
}
template <class U>
uint32_t leading_zeros(U x) {
    return static_cast<uint32_t>(std::countl_zero(x));
}
template <class U>
U reversed(U x) {
    U out = 0;
    for (size_t n = 0; n < 8 * sizeof(U); ++n)
        out |= static_cast<U>((x >> n & 1) << (8 * sizeof(U) - 1 - n));
    return out;
}

Execute decode_not(Modifiers& m, Instruction&) {
    const std::string type = m.type();
    if (type == "pred") return predicate_not;
    if (type == "b16") return unary<uint16_t, uint16_t, complement>;
    return type == "b32" ? unary<uint32_t, uint32_t, complement>
                         : unary<uint64_t, uint64_t, complement>;
}

Execute decode_popc(Modifiers& m, Instruction&) {
    return m.type() == "b32" ? unary<uint32_t, uint32_t, ones> : unary<uint64_t, uint32_t, ones>;
}

Execute decode_clz(Modifiers& m, Instruction&) {
    return m.type() == "b32" ? unary<uint32_t, uint32_t, leading_zeros>
                             : unary<uint64_t, uint32_t, leading_zeros>;
}

Execute decode_brev(Modifiers& m, Instruction&) {
    return m.type() == "b32" ? unary<uint32_t, uint32_t, reversed>
                             : unary<uint64_t, uint64_t, reversed>;
}

// The position of the highest bit that differs from the sign; setting[0]: the shift that brings it
// to the top instead.
template <class T>
Next find_highest(Warp& w, const Instruction& i) {
    using U = std::make_unsigned_t<T>;
    const auto a = w.bits<U>(i[1]);
    Lanes<uint32_t> out;
    for (int l = 0; l < kLanes; ++l) {
        const U x = std::is_signed_v<T> && static_cast<T>(a[l]) < 0 ? static_cast<U>(~a[l]) : a[l];
        const int zeros = std::countl_zero(x), width = 8 * sizeof(U);
        out[l] = zeros == width ? 0xFFFFFFFF
                                : static_cast<uint32_t>(i.setting[0] ? zeros : width - 1 - zeros);
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

Execute decode_bfind(Modifiers& m, Instruction& i) {
    i.setting[0] = m.take("shiftamt");
    return for_integer(m.type(), [](auto t) -> Execute { return find_highest<decltype(t)>; });
}

template <class U>
Next shift_left(Warp& w, const Instruction& i) {
    auto a = w.bits<U>(i[1]);
    const auto n = w.bits<uint32_t>(i[2]);
    for (int l = 0; l < kLanes; ++l)
        a[l] = n[l] < 8 * sizeof(U) ? static_cast<U>(a[l] << n[l]) : U(0);
    w.set(i[0], a);
    return Next::kFollowing;
}

template <class T>
Next shift_right(Warp& w, const Instruction& i) {
    using U = std::make_unsigned_t<T>;
    auto a = w.bits<U>(i[1]);
    const auto n = w.bits<uint32_t>(i[2]);
    for (int l = 0; l < kLanes; ++l) {
        const bool all = n[l] >= 8 * sizeof(T);
        const auto shift = all ? 8 * sizeof(T) - 1 : n[l];
        const T x = static_cast<T>(a[l]);
        a[l] = !std::is_signed_v<T> && all ? U(0) : static_cast<U>(x >> shift);
    }
    w.set(i[0], a);
    return Next::kFollowing;
}

Execute decode_shl(Modifiers& m, Instruction&) {
    return for_integer(
        m.type(), [](auto t) -> Execute { return shift_left<std::make_unsigned_t<decltype(t)>>; });
}

Execute decode_shr(Modifiers& m, Instruction&) {
    return for_integer(m.type(), [](auto t) -> Execute { return shift_right<decltype(t)>; });
}

// Of the 64 bits of two registers. setting[0]: to the left; setting[1]: the amount wraps at 32.
Next funnel_shift(Warp& w, const Instruction& i) {
    const auto low = w.bits<uint32_t>(i[1]), high = w.bits<uint32_t>(i[2]),
               n = w.bits<uint32_t>(i[3]);
    Lanes<uint32_t> out;
    for (int l = 0; l < kLanes; ++l) {
        const uint32_t shift = i.setting[1] ? n[l] & 31 : std::min(n[l], 32u);
        const uint64_t both = static_cast<uint64_t>(high[l]) << 32 | low[l];
        out[l] = static_cast<uint32_t>(i.setting[0] ? both << shift >> 32 : both >> shift);
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

Execute decode_shf(Modifiers& m, Instruction& i) {
    i.setting[0] = m.take("l");
    m.take("r");
    i.setting[1] = m.take("wrap");
    m.take("clamp");
    return m.type() == "b32" ? funnel_shift : nullptr;
}

template <class T>
Next extract_field(Warp& w, const Instruction& i) {
    using U = std::make_unsigned_t<T>;
    constexpr uint32_t kWidth = 8 * sizeof(U);
    auto a = w.bits<U>(i[1]);
    const auto at = w.bits<uint32_t>(i[2]), count = w.bits<uint32_t>(i[3]);
    for (int l = 0; l < kLanes; ++l) {
        const uint32_t first = at[l] & 0xFF, n = count[l] & 0xFF;
        const uint32_t present = first < kWidth ? std::min(n, kWidth - first) : 0;
        const U mask =
            present == kWidth ? static_cast<U>(~U(0)) : static_cast<U>((U(1) << present) - 1);
        // The field is sign-extended beyond the highest bit.
        const bool sign =
            std::is_signed_v<T> && n && a[l] >> std::min(first + n - 1, kWidth - 1) & 1;
        const U field = present ? static_cast<U>(a[l] >> first & mask) : U(0);
        a[l] = sign ? static_cast<U>(field | ~mask) : field;
    }
    w.set(i[0], a);
    return Next::kFollowing;
}

Execute decode_bfe(Modifiers& m, Instruction&) {
    return for_integer(m.type(), [](auto t) -> Execute { return extract_field<decltype(t)>; });
}

template <class U>
Next insert_field(Warp& w, const Instruction& i) {
    constexpr uint32_t kWidth = 8 * sizeof(U);
    const auto field = w.bits<U>(i[1]);
    auto base = w.bits<U>(i[2]);
    const auto at = w.bits<uint32_t>(i[3]), count = w.bits<uint32_t>(i[4]);
    for (int l = 0; l < kLanes; ++l) {
        const uint32_t first = at[l] & 0xFF, n = count[l] & 0xFF;
        if (first >= kWidth || n == 0) continue;
        const U ones = n >= kWidth ? static_cast<U>(~U(0)) : static_cast<U>((U(1) << n) - 1);
        const U mask = static_cast<U>(ones << first);
        base[l] = static_cast<U>((base[l] & ~mask) | (static_cast<U>(field[l] << first) & mask));
    }
    w.set(i[0], base);
    return Next::kFollowing;
}

Execute decode_bfi(Modifiers& m, Instruction&) {
    return m.type() == "b32" ? insert_field<uint32_t> : insert_field<uint64_t>;
}

// setting[0]: amounts wrap at 32.
Next make_mask(Warp& w, const Instruction& i) {
    const auto at = w.bits<uint32_t>(i[1]), count = w.bits<uint32_t>(i[2]);
    Lanes<uint32_t> out;
    for (int l = 0; l < kLanes; ++l) {
        const uint32_t first = i.setting[0] ? at[l] & 31 : std::min(at[l], 32u);
        const uint32_t n = i.setting[0] ? count[l] & 31 : std::min(count[l], 32u);
        out[l] = static_cast<uint32_t>(((1ull << n) - 1) << first);
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

Execute decode_bmsk(Modifiers& m, Instruction& i) {
    i.setting[0] = m.take("wrap");
    m.take("clamp");
    m.take("b32");
    return make_mask;
}

Next lookup(Warp& w, const Instruction& i) {
    const auto a = w.bits<uint32_t>(i[1]), b = w.bits<uint32_t>(i[2]), c = w.bits<uint32_t>(i[3]);
    const auto table = static_cast<uint32_t>(i[4].value);
    Lanes<uint32_t> out{};
    for (int row = 0; row < 8; ++row) {
        if (!(table >> row & 1)) continue;
        for (int l = 0; l < kLanes; ++l) {
            out[l] |=
                (row & 4 ? a[l] : ~a[l]) & (row & 2 ? b[l] : ~b[l]) & (row & 1 ? c[l] : ~c[l]);
        }
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

Execute decode_lop3(Modifiers& m, Instruction&) { return m.type() == "b32" ? lookup : nullptr; }

Next permute_bytes(Warp& w, const Instruction& i) {
    const auto a = w.bits<uint32_t>(i[1]), b = w.bits<uint32_t>(i[2]),
               select = w.bits<uint32_t>(i[3]);
    Lanes<uint32_t> out;
    for (int l = 0; l < kLanes; ++l) {
        const uint64_t both = static_cast<uint64_t>(b[l]) << 32 | a[l];
        out[l] = 0;
        for (int n = 0; n < 4; ++n) {
            const uint32_t choice = select[l] >> (4 * n) & 15;
            uint32_t byte = static_cast<uint32_t>(both >> (8 * (choice & 7)) & 0xFF);
            if (choice & 8) byte = byte & 0x80 ? 0xFF : 0;  // its sign
            out[l] |= byte << (8 * n);
        }
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

Execute decode_prmt(Modifiers& m, Instruction&) {
    return m.type() == "b32" ? permute_bytes : nullptr;
}

}  // namespace

void add_bitwise(Decoders& all) {
    all["and"] = decode_logic<And>;
    all["or"] = decode_logic<Or>;
    all["xor"] = decode_logic<Xor>;
    all["not"] = decode_not;
    all["popc"] = decode_popc;
    all["clz"] = decode_clz;
    all["brev"] = decode_brev;
    all["bfind"] = decode_bfind;
    all["shl"] = decode_shl;
    all["shr"] = decode_shr;
    all["shf"] = decode_shf;
    all["bfe"] = decode_bfe;
    all["bfi"] = decode_bfi;
    all["bmsk"] = decode_bmsk;
    all["lop3"] = decode_lop3;
    all["prmt"] = decode_prmt;
}

}  // namespace ptx
