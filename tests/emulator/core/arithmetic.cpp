// Sums, products, comparisons and selections.
#include <limits>

#include "machine.h"

namespace ptx {
namespace {

template <class T>
T rounded(Wider<T> x) {
    return canonical(static_cast<T>(x));
}

template <class T>
T saturated(T x, bool saturate) {
    if (!saturate) return x;
    const auto wide = static_cast<Wider<T>>(x);
    return static_cast<T>(wide > 0 ? std::min(wide, Wider<T>(1)) : Wider<T>(0));  // NaN too
}

struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return a + b;
    }
};
struct Subtract {
    template <class T>
    T operator()(T a, T b) const {
        return a - b;
    }
};
struct Multiply {
    template <class T>
    T operator()(T a, T b) const {
        return a * b;
    }
};

template <class T, int E, class F>
Next float_binary(Warp& w, const Instruction& i) {
    const auto a = w.values<T, E>(i[1]), b = w.values<T, E>(i[2]);
    std::array<T, kLanes * E> out;
    for (int l = 0; l < kLanes * E; ++l) {
        const T x = flushed(a[l], i.flush), y = flushed(b[l], i.flush);
        const T sum = rounded<T>(F{}(static_cast<Wider<T>>(x), static_cast<Wider<T>>(y)));
        out[l] = saturated(flushed(sum, i.flush), i.saturate);
    }
    w.set_values<T, E>(i[0], out);
    return Next::kFollowing;
}

template <class T, class F>
Next integer_binary(Warp& w, const Instruction& i) {
    using U = std::make_unsigned_t<T>;
    const auto a = w.bits<U>(i[1]), b = w.bits<U>(i[2]);
    Lanes<U> out;
    for (int l = 0; l < kLanes; ++l) {
        // 64 bits, as products of 16-bit numbers would overflow int.
        out[l] = static_cast<U>(F{}(static_cast<uint64_t>(a[l]), static_cast<uint64_t>(b[l])));
        if constexpr (std::is_same_v<T, int32_t>) {
            if (i.saturate) {
                const int64_t exact = F{}(static_cast<int64_t>(static_cast<T>(a[l])),
                                          static_cast<int64_t>(static_cast<T>(b[l])));
                out[l] = static_cast<U>(std::clamp<int64_t>(exact, INT32_MIN, INT32_MAX));
            }
        }
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

void take_rounding(Modifiers& m, Instruction& i) {
    m.take("rn");
    i.flush = m.take("ftz");
    i.saturate = m.take("sat");
}

template <class F>
Execute decode_sum(Modifiers& m, Instruction& i) {
    take_rounding(m, i);
    const std::string type = m.type();
    if (i.saturate && type != "s32" && !type.starts_with("f")) return nullptr;
    if (Execute e = for_float(
            type, [](auto t, auto n) -> Execute { return float_binary<decltype(t), n, F>; })) {
        return e;
    }
    return for_integer(type, [](auto t) -> Execute { return integer_binary<decltype(t), F>; });
}

// The product of two integers in twice their bits.
template <class T>
using Double = std::conditional_t<
    sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>>;

enum class Part { kLow, kHigh, kWide };

// Integer mul (two factors) and mad (also a summand).
template <class T, Part P, bool Sum>
Next integer_product(Warp& w, const Instruction& i) {
    using U = std::make_unsigned_t<T>;
    const auto a = w.bits<U>(i[1]), b = w.bits<U>(i[2]);
    Lanes<Double<T>> exact;
    for (int l = 0; l < kLanes; ++l) {
        exact[l] = static_cast<Double<T>>(static_cast<T>(a[l])) *
                   static_cast<Double<T>>(static_cast<T>(b[l]));
    }
    if constexpr (P == Part::kWide) {
        using W = std::conditional_t<sizeof(T) == 4, uint64_t, uint32_t>;
        Lanes<W> out = Sum ? w.bits<W>(i[3]) : filled<W>(0);
        for (int l = 0; l < kLanes; ++l) out[l] += static_cast<W>(exact[l]);
        w.set(i[0], out);
    } else {
        Lanes<U> out = Sum ? w.bits<U>(i[3]) : filled<U>(0);
        for (int l = 0; l < kLanes; ++l) {
            out[l] += static_cast<U>(P == Part::kHigh ? exact[l] >> (8 * sizeof(T)) : exact[l]);
        }
        w.set(i[0], out);
    }
    return Next::kFollowing;
}

template <bool Sum>
Execute decode_product(Modifiers& m) {
    const std::string part = m.take_any({"lo", "hi", "wide"});
    if (part.empty()) return nullptr;
    const std::string type = m.type();
    return for_integer(type, [&](auto t) -> Execute {
        using T = decltype(t);
        if constexpr (sizeof(T) == 1) {
            return nullptr;
        } else if (part == "lo") {
            return integer_product<T, Part::kLow, Sum>;
        } else if (part == "hi") {
            return integer_product<T, Part::kHigh, Sum>;
        } else if constexpr (sizeof(T) < 8) {
            return integer_product<T, Part::kWide, Sum>;
        } else {
            return nullptr;
        }
    });
}

// Rounded towards zero. The product of two floats is exact in float64.
Next truncated_product(Warp& w, const Instruction& i) {
    const auto a = w.values<float, 1>(i[1]), b = w.values<float, 1>(i[2]);
    Lanes<float> out;
    for (int l = 0; l < kLanes; ++l) {
        const double exact = double(flushed(a[l], i.flush)) * flushed(b[l], i.flush);
        float nearest = static_cast<float>(exact);
        if (std::abs(double(nearest)) > std::abs(exact)) nearest = std::nextafter(nearest, 0.0f);
        out[l] = canonical(flushed(nearest, i.flush));
    }
    w.set_values<float, 1>(i[0], out);
    return Next::kFollowing;
}

Execute decode_mul(Modifiers& m, Instruction& i) {
    if (m.take("rz")) {
        i.flush = m.take("ftz");
        return m.type() == "f32" ? truncated_product : nullptr;
    }
    return m.has("lo") || m.has("hi") || m.has("wide") ? decode_product<false>(m)
                                                       : decode_sum<Multiply>(m, i);
}

// The product of 16-bit formats is exact. The sum is rounded to odd, so that rounding it again
// gives the result of a single rounding.
double product_plus(double x, double y, double z) {
    const double product = x * y, sum = product + z, of_z = sum - product;
    const double rest = (product - (sum - of_z)) + (z - of_z);
    const auto bits = std::bit_cast<uint64_t>(sum);
    if (rest == 0 || !std::isfinite(sum) || bits & 1) return sum;
    return std::bit_cast<double>((rest > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

template <class T, int E>
Next fma(Warp& w, const Instruction& i) {
    const auto a = w.values<T, E>(i[1]), b = w.values<T, E>(i[2]), c = w.values<T, E>(i[3]);
    std::array<T, kLanes * E> out;
    for (int l = 0; l < kLanes * E; ++l) {
        const auto x = static_cast<Wider<T>>(flushed(a[l], i.flush));
        const auto y = static_cast<Wider<T>>(flushed(b[l], i.flush));
        const auto z = static_cast<Wider<T>>(flushed(c[l], i.flush));
        Wider<T> sum;
        if constexpr (sizeof(T) == 2) {
            sum = product_plus(x, y, z);
        } else {
            sum = std::fma(x, y, z);
        }
        if (i.setting[0] && sum <= 0) sum = 0;
        out[l] = saturated(flushed(rounded<T>(sum), i.flush), i.saturate);
    }
    w.set_values<T, E>(i[0], out);
    return Next::kFollowing;
}

// Factors of 16 bits, and a summand of 32.
template <class T>
Next mixed_fma(Warp& w, const Instruction& i) {
    const auto a = w.values<T, 1>(i[1]), b = w.values<T, 1>(i[2]);
    const auto c = w.values<float, 1>(i[3]);
    Lanes<float> out;
    for (int l = 0; l < kLanes; ++l) {
        const float sum = std::fma(static_cast<float>(a[l]), static_cast<float>(b[l]), c[l]);
        out[l] = saturated(canonical(sum), i.saturate);
    }
    w.set_values<float, 1>(i[0], out);
    return Next::kFollowing;
}

// setting[0]: whether the result is clamped at 0.
Execute decode_fma(Modifiers& m, Instruction& i) {
    take_rounding(m, i);
    i.setting[0] = m.take("relu");
    if (m.has("f16") && m.take("f32")) return m.take("f16") ? mixed_fma<Half> : nullptr;
    if (m.has("bf16") && m.take("f32")) return m.take("bf16") ? mixed_fma<Bfloat> : nullptr;
    return for_float(m.type(), [](auto t, auto n) -> Execute { return fma<decltype(t), n>; });
}

Execute decode_mad(Modifiers& m, Instruction& i) {
    return m.has("lo") || m.has("hi") || m.has("wide") ? decode_product<true>(m) : decode_fma(m, i);
}

template <class T, bool Remainder>
Next divide(Warp& w, const Instruction& i) {
    const auto a = std::bit_cast<Lanes<T>>(w.bits<std::make_unsigned_t<T>>(i[1]));
    const auto b = std::bit_cast<Lanes<T>>(w.bits<std::make_unsigned_t<T>>(i[2]));
    Lanes<std::make_unsigned_t<T>> out;
    for (int l = 0; l < kLanes; ++l) {
        if (b[l] == 0 || (std::is_signed_v<T> && b[l] == T(-1))) {
            // Division by 0 is unspecified, and the smallest number has no counterpart.
            const T quotient =
                b[l] == 0 ? T(0x5A5A5A5A) : static_cast<T>(std::make_unsigned_t<T>(0) - a[l]);
            out[l] = static_cast<std::make_unsigned_t<T>>(!Remainder  ? quotient
                                                          : b[l] == 0 ? a[l]
                                                                      : T(0));
        } else {
            out[l] = static_cast<std::make_unsigned_t<T>>(Remainder ? a[l] % b[l] : a[l] / b[l]);
        }
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

struct Quotient {
    template <class T>
    T operator()(T a, T b) const {
        return a / b;
    }
};

Execute decode_approximate_division(Modifiers& m, Instruction& i);

Execute decode_rem(Modifiers& m, Instruction&) {
    return for_integer(m.type(), [](auto t) -> Execute { return divide<decltype(t), true>; });
}

Execute decode_div(Modifiers& m, Instruction& i) {
    if (m.has("full") || m.has("approx")) return decode_approximate_division(m, i);
    if (m.has("rn")) {
        take_rounding(m, i);
        const std::string type = m.type();
        if (type == "f32") return float_binary<float, 1, Quotient>;
        return type == "f64" ? float_binary<double, 1, Quotient> : nullptr;
    }
    return for_integer(m.type(), [](auto t) -> Execute { return divide<decltype(t), false>; });
}

Execute decode_approximate_division(Modifiers& m, Instruction& i) {
    return decoders().at("div.approximate")(m, i);
}

Next dp4a(Warp& w, const Instruction& i) {
    const auto a = w.bits<uint32_t>(i[1]), b = w.bits<uint32_t>(i[2]);
    auto out = w.bits<uint32_t>(i[3]);
    const auto byte = [](uint32_t x, int n, bool is_signed) -> int {
        const auto bits = static_cast<uint8_t>(x >> (8 * n));
        return is_signed ? static_cast<int8_t>(bits) : bits;
    };
    for (int l = 0; l < kLanes; ++l) {
        for (int n = 0; n < 4; ++n) {
            out[l] +=
                static_cast<uint32_t>(byte(a[l], n, i.setting[0]) * byte(b[l], n, i.setting[1]));
        }
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

// setting[0], [1]: whether the bytes of the factors are signed.
Execute decode_dp4a(Modifiers& m, Instruction& i) {
    i.setting[1] = m.type() == "s32";
    i.setting[0] = m.type() == "s32";
    return dp4a;
}

}  // namespace

void add_arithmetic(Decoders& all) {
    all["add"] = decode_sum<Add>;
    all["sub"] = decode_sum<Subtract>;
    all["mul"] = decode_mul;
    all["mad"] = decode_mad;
    all["fma"] = decode_fma;
    all["div"] = decode_div;
    all["rem"] = decode_rem;
    all["dp4a"] = decode_dp4a;
}

}  // namespace ptx
