// Instructions whose results are specified up to an error, which is drawn at random.
#include "machine.h"

namespace ptx {
namespace {

// Uniform in [-1, 1], and determined by the operands and the launch's seed of errors.
double drawn(const Warp& w, const Instruction& i, float a, float b = 0) {
    uint64_t x = std::bit_cast<uint32_t>(a) | static_cast<uint64_t>(std::bit_cast<uint32_t>(b))
                                                  << 32;
    x ^= w.block.cluster.launch.approximation_seed * 0x9E3779B97F4A7C15 +
         static_cast<uint64_t>(i.setting[0]);
    for (int round = 0; round < 3; ++round) {
        x ^= x >> 31;
        x *= 0xD6E8FEB86659FD93;
    }
    return static_cast<double>(static_cast<int64_t>(x)) / 0x1p63;
}

// The distance of floats near x.
double unit_in_last_place(double x) {
    return std::max(std::ldexp(1.0, std::ilogb(x) - 23), static_cast<double>(0x1p-149f));
}

// A float within `bound` of the exact value. The error is uniform, except for rounding.
float within(double bound, double exact, double draw) {
    const auto nearest = static_cast<float>(exact);
    if (exact == 0 || !std::isfinite(nearest)) return nearest;
    const double room = bound - unit_in_last_place(exact) / 2;
    const auto out = static_cast<float>(exact + std::max(room, 0.0) * draw);
    const bool is_near =
        std::fabs(out - exact) <= bound && std::signbit(out) == std::signbit(exact);
    return is_near ? out : nearest;
}

// Each function, and its largest error according to the PTX ISA.
struct Exp2 {
    static double exact(double x) { return std::exp2(x); }
    static double bound(double, double exact) { return 2 * unit_in_last_place(exact); }
};
struct Log2 {
    static double exact(double x) { return std::log2(x); }
    static double bound(double x, double exact) {
        return x > 0.5 && x < 2 ? 0x1p-22 : 0x1p-22 * std::fabs(exact);
    }
};
struct Reciprocal {
    static double exact(double x) { return 1 / x; }
    static double bound(double, double exact) { return unit_in_last_place(exact); }
};
struct SquareRoot {
    static double exact(double x) { return std::sqrt(x); }
    static double bound(double, double exact) { return 0x1p-23 * exact; }
};
struct ReciprocalRoot {
    static double exact(double x) { return 1 / std::sqrt(x); }
    static double bound(double, double exact) { return std::exp2(-22.9) * exact; }
};
// Beyond 100 pi no error is specified; this uses the bound below it.
double bound_of_sine(double x) {
    constexpr double kPi = 3.14159265358979323846;
    return std::exp2(std::fabs(x) <= 2 * kPi ? -20.5 : -14.7);
}
struct Sine {
    static double exact(double x) { return std::sin(x); }
    static double bound(double x, double) { return bound_of_sine(x); }
};
struct Cosine {
    static double exact(double x) { return std::cos(x); }
    static double bound(double x, double) { return bound_of_sine(x); }
};
struct Tanh {
    static double exact(double x) { return std::tanh(x); }
    static double bound(double x, double exact) {
        // Subnormal arguments are returned unchanged, and limits are exact.
        return std::fabs(x) < 0x1p-126 || std::isinf(x) ? 0 : 0x1p-11 * std::fabs(exact);
    }
};

template <class F>
Next approximate(Warp& w, const Instruction& i) {
    auto lanes = w.values<float, 1>(i[1]);
    for (float& one : lanes) {
        const float x = flushed(one, i.flush);
        const double exact = F::exact(x);
        // Zeros and infinities have exact results.
        const bool special = x == 0 || std::isinf(x);
        const double bound = special ? 0 : F::bound(x, exact);
        one = flushed(canonical(within(bound, exact, drawn(w, i, x))), i.flush);
    }
    w.set_values<float, 1>(i[0], lanes);
    return Next::kFollowing;
}

// setting[0]: a salt for the draws of this instruction.
template <class F, int Salt>
Execute decode(Modifiers& m, Instruction& i) {
    i.flush = m.take("ftz");
    i.setting[0] = Salt;
    return m.take("approx") && m.type() == "f32" ? approximate<F> : nullptr;
}

// Correctly rounded instructions.
template <class T, class F>
Next exact_lanes(Warp& w, const Instruction& i) {
    auto x = w.values<T, 1>(i[1]);
    for (T& one : x) {
        one = flushed(canonical(static_cast<T>(F::exact(flushed(one, i.flush)))), i.flush);
    }
    w.set_values<T, 1>(i[0], x);
    return Next::kFollowing;
}

template <class F, int Salt>
Execute decode_exact_too(Modifiers& m, Instruction& i) {
    if (!m.take("rn")) return decode<F, Salt>(m, i);
    i.flush = m.take("ftz");
    const std::string type = m.type();
    if (type == "f32") return exact_lanes<float, F>;
    return type == "f64" ? exact_lanes<double, F> : nullptr;
}

// div.approx and div.full.
Next divide(Warp& w, const Instruction& i) {
    const auto a = w.values<float, 1>(i[1]), b = w.values<float, 1>(i[2]);
    Lanes<float> out;
    for (int l = 0; l < kLanes; ++l) {
        const float x = flushed(a[l], i.flush), y = flushed(b[l], i.flush);
        double exact = static_cast<double>(x) / static_cast<double>(y);
        // Division by multiplication with a reciprocal, which is 0 for numbers above 2^126.
        if (i.setting[1] && std::fabs(y) > 0x1p126f && std::isfinite(y)) {
            exact = static_cast<double>(x) * std::copysign(0.0, static_cast<double>(y));
        }
        const bool special = x == 0 || y == 0 || !std::isfinite(exact) || exact == 0;
        const double bound = special ? 0 : 2 * unit_in_last_place(exact);
        out[l] = flushed(canonical(within(bound, exact, drawn(w, i, x, y))), i.flush);
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
    all["rcp"] = decode_exact_too<Reciprocal, 3>;
    all["sqrt"] = decode_exact_too<SquareRoot, 4>;
    all["rsqrt"] = decode<ReciprocalRoot, 5>;
    all["sin"] = decode<Sine, 6>;
    all["cos"] = decode<Cosine, 7>;
    all["tanh"] = decode<Tanh, 8>;
    all["div.approximate"] = decode_division;
}

}  // namespace ptx
