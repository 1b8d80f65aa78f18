// Instructions whose results are specified up to an error, which is drawn here within its bound.
#include "machine.h"

namespace ptx {
namespace {

// Uniform in [-1, 1]: the same for the same operands in launches of one seed.
double drawn(const Warp& w, const Instruction& i, float a, float b = 0) {
    uint64_t x = std::bit_cast<uint32_t>(a) | static_cast<uint64_t>(std::bit_cast<uint32_t>(b))
                                                  << 32;
    x ^= w.block.cluster.launch.seed * 0x9E3779B97F4A7C15 + static_cast<uint64_t>(i.setting[0]);
    for (int round = 0; round < 3; ++round) {
        x ^= x >> 31;
        x *= 0xD6E8FEB86659FD93;
    }
    return static_cast<double>(static_cast<int64_t>(x)) / 0x1p63;
}

// The largest errors, from the PTX ISA: relative to the result, unless they are absolute.
struct Exp2 {
    static constexpr double kBound = 0x1p-22;
    static double exact(double x) { return std::exp2(x); }
};
struct Log2 {
    static constexpr double kBound = 0x1p-22;
    static double exact(double x) { return std::log2(x); }
};
struct Reciprocal {
    static constexpr double kBound = 0x1p-23;
    static double exact(double x) { return 1 / x; }
};
struct SquareRoot {
    static constexpr double kBound = 0x1p-23;
    static double exact(double x) { return std::sqrt(x); }
};
struct ReciprocalRoot {
    static constexpr double kBound = 0x1.1p-23;  // 2^-22.9
    static double exact(double x) { return 1 / std::sqrt(x); }
};
struct Sine {
    static constexpr double kBound = 0x1.6p-21;  // 2^-20.5, absolute
    static double exact(double x) { return std::sin(x); }
};
struct Cosine {
    static constexpr double kBound = 0x1.6p-21;
    static double exact(double x) { return std::cos(x); }
};
struct Tanh {
    static constexpr double kBound = 0x1p-11;
    static double exact(double x) { return std::tanh(x); }
};

template <class F>
constexpr bool kAbsolute = std::is_same_v<F, Sine> || std::is_same_v<F, Cosine>;

// What a rounding to float adds to an error.
constexpr double kOfRounding = 0x1p-24;

template <class F>
float approximate(const Warp& w, const Instruction& i, float x) {
    if (i.flush) x = flush_subnormal(x);
    const double exact = F::exact(x);
    double error = (F::kBound - (kAbsolute<F> ? 0 : kOfRounding)) * drawn(w, i, x);
    if (!kAbsolute<F>) error *= exact;
    if (std::is_same_v<F, Log2> && x > 0.5f && x < 2)
        error = (F::kBound - kOfRounding) * drawn(w, i, x);
    // Zeros, infinities, NaN, and powers of zero are exact.
    const bool special = x == 0 || std::isinf(x) || std::isnan(x) || exact == 0;
    const float out = canonical(static_cast<float>(special ? exact : exact + error));
    return i.flush ? flush_subnormal(out) : out;
}

template <class F>
Next approximate_lanes(Warp& w, const Instruction& i) {
    auto x = w.values<float, 1>(i[1]);
    for (auto& one : x) one = approximate<F>(w, i, one);
    w.set_values<float, 1>(i[0], x);
    return Next::kFollowing;
}

// Rounded correctly.
template <class T, class F>
Next exact_lanes(Warp& w, const Instruction& i) {
    auto x = w.values<T, 1>(i[1]);
    for (auto& one : x) one = canonical(static_cast<T>(F::exact(one)));
    w.set_values<T, 1>(i[0], x);
    return Next::kFollowing;
}

// setting[0]: what distinguishes the draws of instructions.
template <class F, int Salt>
Execute decode(Modifiers& m, Instruction& i) {
    i.flush = m.take("ftz");
    i.setting[0] = Salt;
    const bool is_approximate = m.take("approx");
    m.take("rn");
    const std::string type = m.type();
    if (is_approximate) return type == "f32" ? approximate_lanes<F> : nullptr;
    if (type == "f32") return exact_lanes<float, F>;
    return type == "f64" ? exact_lanes<double, F> : nullptr;
}

// div.approx and div.full: up to 2 units in the last place.
Next divide(Warp& w, const Instruction& i) {
    const auto a = w.values<float, 1>(i[1]), b = w.values<float, 1>(i[2]);
    Lanes<float> out;
    for (int l = 0; l < kLanes; ++l) {
        const float x = i.flush ? flush_subnormal(a[l]) : a[l],
                    y = i.flush ? flush_subnormal(b[l]) : b[l];
        // In the division that is approximate everywhere, divisors from 2^126 on give 0.
        const bool vanishes = i.setting[1] && std::fabs(y) > 0x1p126f && std::isfinite(y);
        const double exact = vanishes ? std::copysign(0.0, x) * std::copysign(1.0, y)
                                      : static_cast<double>(x) / static_cast<double>(y);
        const double error = exact * (0x1p-22 - kOfRounding) * 0.5 * drawn(w, i, x, y);
        const bool special = x == 0 || y == 0 || !std::isfinite(exact) || std::isinf(y);
        out[l] = canonical(static_cast<float>(special ? exact : exact + error));
        if (i.flush) out[l] = flush_subnormal(out[l]);
    }
    w.set_values<float, 1>(i[0], out);
    return Next::kFollowing;
}

// setting[1]: div.approx.
Execute decode_division(Modifiers& m, Instruction& i) {
    i.flush = m.take("ftz");
    i.setting[1] = m.take("approx");
    m.take("full");
    return m.type() == "f32" ? divide : nullptr;
}

}  // namespace

void add_approximations(Decoders& all) {
    all["ex2"] = decode<Exp2, 1>;
    all["lg2"] = decode<Log2, 2>;
    all["rcp"] = decode<Reciprocal, 3>;
    all["sqrt"] = decode<SquareRoot, 4>;
    all["rsqrt"] = decode<ReciprocalRoot, 5>;
    all["sin"] = decode<Sine, 6>;
    all["cos"] = decode<Cosine, 7>;
    all["tanh"] = decode<Tanh, 8>;
    all["div.approximate"] = decode_division;
}

}  // namespace ptx
