// cvt and cvta.
#include "machine.h"

namespace ptx {
namespace {

// Floats beyond the range of an integer become its nearest limit. NaN becomes 0, or, if one of the
// formats has 64 bits, the number with only the highest bit set.
template <class To>
To clamped(double x, bool is_wide) {
    using Limits = std::numeric_limits<To>;
    if (std::isnan(x))
        return is_wide ? static_cast<To>(uint64_t{1} << (8 * sizeof(To) - 1)) : To(0);
    if (x <= static_cast<double>(Limits::min())) return Limits::min();
    if (x >= static_cast<double>(Limits::max())) return Limits::max();
    return static_cast<To>(x);
}

// setting[0]: round to an integral value; [1]: clamp at 0; [2]: clamp to finite values.
template <class To, class From>
To float_from_float(From from, const Instruction& i) {
    auto x = static_cast<double>(flushed(from, i.flush && std::is_same_v<From, float>));
    if (i.setting[0]) x = static_cast<double>(to_integral(x, i.rounding));
    if (i.setting[1] && x <= 0) x = 0;
    if (i.saturate) x = x > 0 ? std::min(x, 1.0) : 0;  // NaN becomes 0
    To out = i.rounding == Rounding::kNearest || i.setting[0]
                 ? static_cast<To>(x)
                 : static_cast<To>(rounded_to(kFormat<To>, x, i.rounding));
    if (i.setting[2] && std::isinf(static_cast<double>(out))) {
        out = static_cast<To>(std::copysign(kFormat<To>.largest, x));
    }
    return canonical(flushed(out, i.flush && std::is_same_v<To, float>));
}

template <class To, class From>
To converted(From from, const Instruction& i) {
    constexpr bool kFromFloat = kIsFloat<From>, kToFloat = kIsFloat<To>;
    if constexpr (kFromFloat && kToFloat) {
        return float_from_float<To, From>(from, i);
    } else if constexpr (kFromFloat) {
        const double x = static_cast<double>(flushed(from, i.flush));
        constexpr bool kWide = sizeof(To) == 8 || sizeof(From) == 8;
        return clamped<To>(static_cast<double>(to_integral(x, i.rounding)), kWide);
    } else if constexpr (kToFloat) {
        return static_cast<To>(rounded_to(kFormat<To>, static_cast<long double>(from), i.rounding));
    } else if (i.saturate) {
        const auto low = static_cast<__int128>(std::numeric_limits<To>::min());
        const auto high = static_cast<__int128>(std::numeric_limits<To>::max());
        return static_cast<To>(std::clamp(static_cast<__int128>(from), low, high));
    } else {
        return static_cast<To>(from);
    }
}

template <class To, class From>
Next convert(Warp& w, const Instruction& i) {
    const auto from = w.values<From, 1>(i[1]);
    std::array<To, kLanes> out;
    for (int l = 0; l < kLanes; ++l) out[l] = converted<To, From>(from[l], i);
    if constexpr (std::is_integral_v<To>) {
        w.set(i[0], out);
    } else {
        w.set_values<To, 1>(i[0], out);
    }
    return Next::kFollowing;
}

// Two floats to one register, the first operand to the upper half.
template <class To>
Next convert_pair(Warp& w, const Instruction& i) {
    const auto high = w.values<float, 1>(i[1]), low = w.values<float, 1>(i[2]);
    std::array<To, 2 * kLanes> out;
    for (int l = 0; l < kLanes; ++l) {
        out[2 * l] = converted<To, float>(low[l], i);
        out[2 * l + 1] = converted<To, float>(high[l], i);
    }
    w.set_values<To, 2>(i[0], out);
    return Next::kFollowing;
}

template <class To>
uint16_t to_8_bits(float high, float low, const Instruction& i) {
    const auto one = [&](float x) -> uint16_t {
        return To(i.setting[1] && x <= 0 ? 0.0f : x).bits;
    };
    return static_cast<uint16_t>(one(high) << 8 | one(low));
}

template <class To>
Next convert_pair_to_8_bits(Warp& w, const Instruction& i) {
    const auto high = w.values<float, 1>(i[1]), low = w.values<float, 1>(i[2]);
    Lanes<uint16_t> out;
    for (int l = 0; l < kLanes; ++l) out[l] = to_8_bits<To>(high[l], low[l], i);
    w.set(i[0], out);
    return Next::kFollowing;
}

template <class To, class From>
Next convert_packed_to_8_bits(Warp& w, const Instruction& i) {
    const auto from = w.values<From, 2>(i[1]);
    Lanes<uint16_t> out;
    for (int l = 0; l < kLanes; ++l) {
        out[l] =
            to_8_bits<To>(static_cast<float>(from[2 * l + 1]), static_cast<float>(from[2 * l]), i);
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

template <class From>
Next convert_pair_from_8_bits(Warp& w, const Instruction& i) {
    const auto from = w.bits<uint16_t>(i[1]);
    std::array<Half, 2 * kLanes> out;
    for (int l = 0; l < 2 * kLanes; ++l) {
        const auto bits = static_cast<uint8_t>(from[l / 2] >> (l % 2 ? 8 : 0));
        out[l] = float_from_float<Half>(float{std::bit_cast<From>(bits)}, i);
    }
    w.set_values<Half, 2>(i[0], out);
    return Next::kFollowing;
}

Next convert_to_tf32(Warp& w, const Instruction& i) {
    static constexpr Format kTf32{11, -126, 0x1.FFCp127};
    auto a = w.values<float, 1>(i[1]);
    for (float& x : a) {
        if (i.setting[1] && x <= 0) x = 0;
        x = canonical(static_cast<float>(rounded_to(kTf32, x, i.rounding)));
        if (i.setting[2] && std::isinf(x)) x = std::copysign(static_cast<float>(kTf32.largest), x);
    }
    w.set_values<float, 1>(i[0], a);
    return Next::kFollowing;
}

template <class To>
Execute convert_from(const std::string& from) {
    if (from == "f32") return convert<To, float>;
    if (from == "f64") return convert<To, double>;
    if (from == "f16") return convert<To, Half>;
    if (from == "bf16") return convert<To, Bfloat>;
    return for_integer(from, [](auto t) -> Execute { return convert<To, decltype(t)>; });
}

template <class To>
Execute to_packed_8_bits_from(const std::string& from) {
    if (from == "f32") return convert_pair_to_8_bits<To>;
    if (from == "f16x2") return convert_packed_to_8_bits<To, Half>;
    return from == "bf16x2" ? convert_packed_to_8_bits<To, Bfloat> : nullptr;
}

Execute to_packed_8_bits(const std::string& to, const std::string& from) {
    return to == "e4m3x2" ? to_packed_8_bits_from<Float8E4M3>(from)
                          : to_packed_8_bits_from<Float8E5M2>(from);
}

Execute decode_cvt(Modifiers& m, Instruction& i) {
    i.flush = m.take("ftz");
    i.saturate = m.take("sat");
    i.setting[1] = m.take("relu");
    i.setting[2] = m.take("satfinite");
    static const std::map<std::string, Rounding> roundings = {{"rn", Rounding::kNearest},
                                                              {"rz", Rounding::kZero},
                                                              {"rm", Rounding::kDown},
                                                              {"rp", Rounding::kUp},
                                                              {"rna", Rounding::kAway}};
    for (const auto& [name, rounding] : roundings) {
        if (m.take(name)) i.rounding = rounding;
        if (m.take(name + "i")) i.rounding = rounding, i.setting[0] = true;
    }
    const std::string from = m.type(), to = m.type();
    if (to == "tf32" && from == "f32") return convert_to_tf32;
    if (to == "e4m3x2" || to == "e5m2x2")
        return i.setting[2] ? to_packed_8_bits(to, from) : nullptr;
    if (to == "f16x2" && from == "e4m3x2") return convert_pair_from_8_bits<Float8E4M3>;
    if (to == "f16x2" && from == "e5m2x2") return convert_pair_from_8_bits<Float8E5M2>;
    if (to == "f16x2" && from == "f32" && i.size() == 3) return convert_pair<Half>;
    if (to == "bf16x2" && from == "f32" && i.size() == 3) return convert_pair<Bfloat>;
    if (to == "f32") return convert_from<float>(from);
    if (to == "f64") return convert_from<double>(from);
    if (to == "f16") return convert_from<Half>(from);
    if (to == "bf16") return convert_from<Bfloat>(from);
    return for_integer(to, [&](auto t) -> Execute { return convert_from<decltype(t)>(from); });
}

// setting[0]: from the window to a generic address, or back where negative; setting[1]: the window.
Next convert_address(Warp& w, const Instruction& i) {
    auto a = i[1].kind == Operand::Kind::kAddress ? w.addresses(i[1]) : w.bits<uint64_t>(i[1]);
    for (auto& one : a) one += static_cast<uint64_t>(i.setting[0] * i.setting[1]);
    w.set(i[0], a);
    return Next::kFollowing;
}

Execute decode_cvta(Modifiers& m, Instruction& i) {
    i.setting[0] = m.take("to") ? -1 : 1;
    const std::string space = m.pop_front();
    if (space.starts_with("shared")) {
        i.setting[1] = static_cast<int64_t>(kSharedWindow);
    } else if (space == "local") {
        i.setting[1] = static_cast<int64_t>(kLocalWindow);
    } else if (space == "param") {
        i.setting[1] = static_cast<int64_t>(kParameterWindow);
    } else if (space != "global" && space != "const") {
        return nullptr;
    }
    m.type();
    return convert_address;
}

}  // namespace

void add_conversions(Decoders& all) {
    all["cvt"] = decode_cvt;
    all["cvta"] = decode_cvta;
}

}  // namespace ptx
