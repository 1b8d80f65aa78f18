// Minima, maxima and signs.
#include <algorithm>
#include <limits>

#include "machine.h"

namespace ptx {
namespace {

// setting[0]: NaN of an operand is the result; setting[1]: clamped at 0; setting[2]: of absolute
// values, with the product of the operands' signs.
template <class T, int E, bool Max>
Next float_extreme(Warp& w, const Instruction& i) {
    auto out = w.values<T, E>(i[1]);
    for (size_t operand = 2; operand < i.size(); ++operand) {
        const auto b = w.values<T, E>(i[operand]);
        for (int l = 0; l < kLanes * E; ++l) {
            auto x = static_cast<Wider<T>>(flushed(out[l], i.flush));
            auto y = static_cast<Wider<T>>(flushed(b[l], i.flush));
            const bool is_negative = i.setting[2] && std::signbit(x) != std::signbit(y);
            if (i.setting[2]) x = std::abs(x), y = std::abs(y);
            Wider<T> best;
            if (std::isnan(x) || std::isnan(y)) {
                best = i.setting[0] || std::isnan(y) ? (std::isnan(x)  ? x
                                                        : i.setting[0] ? y
                                                                       : x)
                                                     : y;
            } else if (x == y) {
                best = std::signbit(x) == Max ? y : x;  // -0 is less than 0
            } else {
                best = (x < y) == Max ? y : x;
            }
            if (i.setting[1] && !(best > 0) && !std::isnan(best)) best = 0;
            out[l] = canonical(static_cast<T>(is_negative ? -best : best));
        }
    }
    w.set_values<T, E>(i[0], out);
    return Next::kFollowing;
}

template <class T, bool Max>
Next integer_extreme(Warp& w, const Instruction& i) {
    auto out = std::bit_cast<Lanes<T>>(w.bits<std::make_unsigned_t<T>>(i[1]));
    const auto b = std::bit_cast<Lanes<T>>(w.bits<std::make_unsigned_t<T>>(i[2]));
    for (int l = 0; l < kLanes; ++l) {
        out[l] = Max ? std::max(out[l], b[l]) : std::min(out[l], b[l]);
        if (i.setting[1]) out[l] = std::max(out[l], T(0));
    }
    w.set(i[0], std::bit_cast<Lanes<std::make_unsigned_t<T>>>(out));
    return Next::kFollowing;
}

template <bool Max>
Execute decode_extreme(Modifiers& m, Instruction& i) {
    i.flush = m.take("ftz");
    i.setting[0] = m.take("NaN");
    i.setting[1] = m.take("relu");
    i.setting[2] = m.take("xorsign") && m.take("abs");
    const std::string type = m.type();
    if (Execute e = for_float(
            type, [](auto t, auto n) -> Execute { return float_extreme<decltype(t), n, Max>; })) {
        return e;
    }
    return for_integer(type, [](auto t) -> Execute { return integer_extreme<decltype(t), Max>; });
}

// neg and abs of floats change only the sign bit.
template <class T, int E, bool Absolute>
Next float_sign(Warp& w, const Instruction& i) {
    auto out = w.values<T, E>(i[1]);
    for (auto& one : out) {
        one = flushed(one, i.flush);
        using U = Bits<T>;
        constexpr U kSign = U(1) << (8 * sizeof(T) - 1);
        const U bits = std::bit_cast<U>(one);
        one = std::bit_cast<T>(static_cast<U>(Absolute ? bits & ~kSign : bits ^ kSign));
    }
    w.set_values<T, E>(i[0], out);
    return Next::kFollowing;
}

template <class T, bool Absolute>
Next integer_sign(Warp& w, const Instruction& i) {
    using U = std::make_unsigned_t<T>;
    auto out = w.bits<U>(i[1]);
    for (auto& one : out) {
        if (!Absolute || static_cast<T>(one) < 0) one = static_cast<U>(U(0) - one);
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

template <bool Absolute>
Execute decode_sign(Modifiers& m, Instruction& i) {
    i.flush = m.take("ftz");
    const std::string type = m.type();
    if (Execute e = for_float(
            type, [](auto t, auto n) -> Execute { return float_sign<decltype(t), n, Absolute>; })) {
        return e;
    }
    return for_integer(type, [](auto t) -> Execute { return integer_sign<decltype(t), Absolute>; });
}

template <class T>
Next copysign(Warp& w, const Instruction& i) {
    const auto sign = w.values<T, 1>(i[1]), magnitude = w.values<T, 1>(i[2]);
    Lanes<T> out;
    for (int l = 0; l < kLanes; ++l) out[l] = std::copysign(magnitude[l], sign[l]);
    w.set_values<T, 1>(i[0], out);
    return Next::kFollowing;
}

Execute decode_copysign(Modifiers& m, Instruction&) {
    return m.type() == "f32" ? copysign<float> : copysign<double>;
}

}  // namespace

void add_extremes(Decoders& all) {
    all["min"] = decode_extreme<false>;
    all["max"] = decode_extreme<true>;
    all["neg"] = decode_sign<false>;
    all["abs"] = decode_sign<true>;
    all["copysign"] = decode_copysign;
}

}  // namespace ptx
