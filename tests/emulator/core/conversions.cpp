// cvt and cvta.
#include "machine.h"

namespace ptx {
namespace {

double to_integral(double x, Rounding rounding) {
    switch (rounding) {
        case Rounding::kZero: return std::trunc(x);
        case Rounding::kDown: return std::floor(x);
        case Rounding::kUp: return std::ceil(x);
        default: return std::nearbyint(x);
    }
}

// Floats beyond the range of an integer become its nearest limit, and NaN 0.
template <class To>
To clamped(double x) {
    if (std::isnan(x)) return 0;
    if (x <= static_cast<double>(std::numeric_limits<To>::min()))
        return std::numeric_limits<To>::min();
    if (x >= static_cast<double>(std::numeric_limits<To>::max()))
        return std::numeric_limits<To>::max();
    return static_cast<To>(x);
}

// setting[0]: to an integral value; setting[1]: clamped at 0.
template <class To, class From>
To converted(From from, const Instruction& i) {
    constexpr bool kFromFloat = kIsFloat<From>, kToFloat = kIsFloat<To>;
    if constexpr (kFromFloat) {
        auto x = static_cast<double>(from);
        if constexpr (std::is_same_v<From, float>) {
            if (i.flush) x = flush_subnormal(from);
        }
        if (!kToFloat || i.setting[0]) x = to_integral(x, i.rounding);
        if constexpr (!kToFloat) return clamped<To>(x);
        if (i.setting[1] && x < 0) x = 0;
        if (i.saturate) x = std::isnan(x) || x < 0 ? 0 : x > 1 ? 1 : x;
        if constexpr (kToFloat) {
            if (i.rounding == Rounding::kZero && !i.setting[0]) {
                // Only ever from f32 to fewer bits: what is left out of the pattern rounds to 0.
                const auto bits = std::bit_cast<uint32_t>(static_cast<float>(x));
                if constexpr (std::is_same_v<To, Bfloat>)
                    x = std::bit_cast<float>(bits & 0xFFFF0000);
                if constexpr (std::is_same_v<To, Half>) x = std::bit_cast<float>(bits & 0xFFFFE000);
            }
            return canonical(static_cast<To>(x));
        }
    } else if constexpr (kToFloat) {
        if constexpr (std::is_same_v<To, float> || std::is_same_v<To, double>) {
            return static_cast<To>(from);  // rounded once, to nearest
        } else {
            return static_cast<To>(static_cast<double>(from));
        }
    } else {
        if (i.saturate) {
            const auto x = static_cast<__int128>(from);
            const auto low = static_cast<__int128>(std::numeric_limits<To>::min());
            const auto high = static_cast<__int128>(std::numeric_limits<To>::max());
            return static_cast<To>(std::clamp(x, low, high));
        }
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

// Two floats to one register: the first operand goes to the upper half.
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
Next convert_pair_to_8_bits(Warp& w, const Instruction& i) {
    const auto high = w.values<float, 1>(i[1]), low = w.values<float, 1>(i[2]);
    Lanes<uint16_t> out;
    for (int l = 0; l < kLanes; ++l) {
        const float a = i.setting[1] && high[l] < 0 ? 0 : high[l];
        const float b = i.setting[1] && low[l] < 0 ? 0 : low[l];
        out[l] = static_cast<uint16_t>(To(a).bits << 8 | To(b).bits);
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

template <class From>
Half from_8_bits(int bits) {
    return canonical(static_cast<Half>(float{std::bit_cast<From>(static_cast<uint8_t>(bits))}));
}

template <class From>
Next convert_pair_from_8_bits(Warp& w, const Instruction& i) {
    const auto from = w.bits<uint16_t>(i[1]);
    std::array<Half, 2 * kLanes> out;
    for (int l = 0; l < kLanes; ++l) {
        out[2 * l] = from_8_bits<From>(from[l]);
        out[2 * l + 1] = from_8_bits<From>(from[l] >> 8);
    }
    w.set_values<Half, 2>(i[0], out);
    return Next::kFollowing;
}

Next convert_to_tf32(Warp& w, const Instruction& i) {
    auto a = w.bits<uint32_t>(i[1]);
    for (auto& one : a) {
        if (std::isnan(std::bit_cast<float>(one))) {
            one = 0x7FFFFFFF;
            continue;
        }
        // Ties away from zero, or to even.
        const uint32_t half = i.rounding == Rounding::kAway ? 0x1000 : 0xFFF + (one >> 13 & 1);
        one = (one + half) & 0xFFFFE000;
    }
    w.set(i[0], a);
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

Execute decode_cvt(Modifiers& m, Instruction& i) {
    i.flush = m.take("ftz");
    i.saturate = m.take("sat");
    i.setting[1] = m.take("relu");
    const bool finite = m.take("satfinite");
    static const std::map<std::string, Rounding> roundings = {
        {"rn", Rounding::kNearest}, {"rz", Rounding::kZero}, {"rna", Rounding::kAway}};
    static const std::map<std::string, Rounding> integral = {{"rni", Rounding::kNearest},
                                                             {"rzi", Rounding::kZero},
                                                             {"rmi", Rounding::kDown},
                                                             {"rpi", Rounding::kUp}};
    for (const auto& [name, rounding] : roundings) {
        if (m.take(name)) i.rounding = rounding;
    }
    for (const auto& [name, rounding] : integral) {
        if (m.take(name)) i.rounding = rounding, i.setting[0] = true;
    }
    const std::string from = m.type(), to = m.type();
    if (to == "tf32" && from == "f32") return convert_to_tf32;
    if (to == "e4m3x2" && from == "f32" && finite) return convert_pair_to_8_bits<Float8E4M3>;
    if (to == "e5m2x2" && from == "f32" && finite) return convert_pair_to_8_bits<Float8E5M2>;
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
