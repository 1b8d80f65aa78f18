// Exchanges between lanes of a warp.
#include <utility>

#include "machine.h"

namespace ptx {
namespace {

// Runs `exchange` for each set of lanes with the same member mask, once all of them have arrived.
template <class F>
Next among_members(Warp& w, const Operand& o, F exchange) {
    const Mask here = w.active;
    const auto members = w.bits<uint32_t>(o);
    Mask all = 0;
    for (int l = 0; l < kLanes; ++l) {
        if (!(here >> l & 1)) continue;
        if (!(members[l] >> l & 1)) {
            w.fault(kind::kDivergence, "a lane is not in its member mask", l);
        }
        all |= members[l];
    }
    if (!w.gathers(all)) return Next::kAgain;
    for (Mask rest = here; rest; rest &= ~w.active) {
        const int first = std::countr_zero(rest);
        w.active = 0;
        for (int l = first; l < kLanes; ++l) {
            if (rest >> l & 1 && members[l] == members[first]) w.active |= 1u << l;
        }
        const Mask left_out = members[first] & w.alive() & ~w.active;
        if (left_out) {
            w.fault(kind::kInvalid, "lanes have different member masks",
                    std::countr_zero(left_out));
        }
        exchange();
    }
    w.active = here;
    return Next::kFollowing;
}

enum Mode { kUp, kDown, kButterfly, kIndex };

Next shuffle(Warp& w, const Instruction& i) {
    return among_members(w, i[4], [&] {
        // Lanes may provide uninitialized values, as in reductions over fewer lanes.
        w.passes_unknown = true;
        const auto value = w.bits<uint32_t>(i[1]);
        w.passes_unknown = false;
        const Mask unknown = std::exchange(w.unknown, 0);
        const auto by = w.bits<uint32_t>(i[2]), clamp = w.bits<uint32_t>(i[3]);
        Lanes<uint32_t> out;
        Mask in_range = 0;
        for (int l = 0; l < kLanes; ++l) {
            if (!(w.active >> l & 1)) continue;
            const int segment = static_cast<int>(clamp[l] >> 8 & 31),
                      limit = static_cast<int>(clamp[l] & 31);
            const int low = l & segment, high = low | (limit & ~segment);
            const int b = static_cast<int>(by[l] & 31);
            int source = l;
            bool is_in = false;
            switch (i.setting[0]) {
                case kUp: source = l - b, is_in = source >= high; break;
                case kDown: source = l + b, is_in = source <= high; break;
                case kButterfly: source = l ^ b, is_in = source <= high; break;
                default: source = low | (b & ~segment), is_in = source <= high;
            }
            if (!is_in) source = l;
            if (!(w.active >> source & 1)) {
                w.fault(kind::kDivergence,
                        "shfl reads lane " + std::to_string(source) + ", which does not take part",
                        l);
            }
            out[l] = value[source];
            w.unknown |= (unknown >> source & 1) << l;
            in_range |= static_cast<Mask>(is_in) << l;
        }
        const bool pair = i[0].kind == Operand::Kind::kPair;
        w.set(pair ? i[0].elements[0] : i[0], out);
        w.unknown = 0;
        if (pair) w.set_predicate(i[0].elements[1], in_range);
    });
}

Execute decode_shfl(Modifiers& m, Instruction& i) {
    m.take("sync");
    const std::string mode = m.take_any({"up", "down", "bfly", "idx"});
    i.setting[0] = mode == "up"     ? kUp
                   : mode == "down" ? kDown
                   : mode == "bfly" ? kButterfly
                                    : kIndex;
    return m.type() == "b32" && i.size() == 5 ? shuffle : nullptr;
}

Next vote(Warp& w, const Instruction& i) {
    return among_members(w, i[2], [&] {
        const Mask yes = w.predicate(i[1]) & w.active;
        switch (i.setting[0]) {
            case 0: w.set(i[0], filled(yes)); break;
            case 1: w.set_predicate(i[0], yes == w.active ? kAllLanes : 0); break;
            case 2: w.set_predicate(i[0], yes ? kAllLanes : 0); break;
            default: w.set_predicate(i[0], yes == w.active || !yes ? kAllLanes : 0);
        }
    });
}

// setting[0]: ballot, all, any or uni.
Execute decode_vote(Modifiers& m, Instruction& i) {
    m.take("sync");
    const std::string mode = m.take_any({"ballot", "all", "any", "uni"});
    i.setting[0] = mode == "ballot" ? 0 : mode == "all" ? 1 : mode == "any" ? 2 : 3;
    m.type();
    return vote;
}

template <class U>
Next match(Warp& w, const Instruction& i) {
    return among_members(w, i[2], [&] {
        const auto value = w.bits<U>(i[1]);
        Lanes<uint32_t> out{};
        for (int l = 0; l < kLanes; ++l) {
            for (int other = 0; other < kLanes; ++other) {
                const bool same = w.active >> other & 1 && value[other] == value[l];
                out[l] |= static_cast<uint32_t>(same) << other;
            }
        }
        if (!i.setting[0]) {
            w.set(i[0], out);
            return;
        }
        const bool all = out[w.first_lane()] == w.active;
        const bool pair = i[0].kind == Operand::Kind::kPair;
        w.set(pair ? i[0].elements[0] : i[0], filled(all ? w.active : 0u));
        if (pair) w.set_predicate(i[0].elements[1], all ? kAllLanes : 0);
    });
}

// setting[0]: whether all lanes must have equal values.
Execute decode_match(Modifiers& m, Instruction& i) {
    i.setting[0] = m.take("all");
    m.take("any");
    m.take("sync");
    return m.type() == "b32" ? match<uint32_t> : match<uint64_t>;
}

template <class T, class F>
Next reduce(Warp& w, const Instruction& i) {
    return among_members(w, i[2], [&] {
        const auto value = w.values<T, 1>(i[1]);
        T result = value[w.first_lane()];
        for (int l = w.first_lane() + 1; l < kLanes; ++l) {
            if (w.active >> l & 1) result = F{}(result, value[l], i);
        }
        Lanes<T> out;
        out.fill(result);
        w.set_values<T, 1>(i[0], out);
    });
}

struct Sum {
    template <class T>
    T operator()(T a, T b, const Instruction&) const {
        return a + b;
    }
};
struct And {
    template <class T>
    T operator()(T a, T b, const Instruction&) const {
        return a & b;
    }
};
struct Or {
    template <class T>
    T operator()(T a, T b, const Instruction&) const {
        return a | b;
    }
};
struct Xor {
    template <class T>
    T operator()(T a, T b, const Instruction&) const {
        return a ^ b;
    }
};
// setting[0]: of absolute values; setting[1]: whether NaN propagates.
template <bool Max>
struct Extreme {
    template <class T>
    T operator()(T a, T b, const Instruction& i) const {
        if constexpr (std::is_floating_point_v<T>) {
            if (i.setting[0]) a = std::fabs(a), b = std::fabs(b);
            if (std::isnan(a) || std::isnan(b)) {
                if (i.setting[1]) return canonical(std::numeric_limits<T>::quiet_NaN());
                return std::isnan(a) ? b : a;
            }
        }
        return Max ? std::max(a, b) : std::min(a, b);
    }
};

template <class F>
Execute reduce_as(const std::string& type) {
    if (type == "u32" || type == "b32") return reduce<uint32_t, F>;
    if (type == "s32") return reduce<int32_t, F>;
    return nullptr;
}

Execute decode_redux(Modifiers& m, Instruction& i) {
    m.take("sync");
    i.setting[0] = m.take("abs");
    i.setting[1] = m.take("NaN");
    const std::string type = m.type(), operation = m.type();
    if (operation == "add") return reduce_as<Sum>(type);
    if (operation == "and") return reduce_as<And>(type);
    if (operation == "or") return reduce_as<Or>(type);
    if (operation == "xor") return reduce_as<Xor>(type);
    const bool max = operation == "max";
    if (!max && operation != "min") return nullptr;
    if (type == "f32") return max ? reduce<float, Extreme<true>> : reduce<float, Extreme<false>>;
    return max ? reduce_as<Extreme<true>>(type) : reduce_as<Extreme<false>>(type);
}

Next elect(Warp& w, const Instruction& i) {
    return among_members(w, i[1], [&] {
        const int leader = w.first_lane();
        const bool pair = i[0].kind == Operand::Kind::kPair;
        if (pair) w.set(i[0].elements[0], filled(static_cast<uint32_t>(leader)));
        w.set_predicate(pair ? i[0].elements[1] : i[0], 1u << leader);
    });
}

Execute decode_elect(Modifiers& m, Instruction&) { return m.take("sync") ? elect : nullptr; }

Next active_mask(Warp& w, const Instruction& i) {
    w.set(i[0], filled(w.active));
    return Next::kFollowing;
}

Execute decode_activemask(Modifiers& m, Instruction&) {
    return m.take("b32") ? active_mask : nullptr;
}

}  // namespace

void add_warp_exchanges(Decoders& all) {
    all["shfl"] = decode_shfl;
    all["vote"] = decode_vote;
    all["match"] = decode_match;
    all["redux"] = decode_redux;
    all["elect"] = decode_elect;
    all["activemask"] = decode_activemask;
}

}  // namespace ptx
