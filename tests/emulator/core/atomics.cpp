// atom and red: atomic operations on shared and global memory.
#include "accesses.h"

namespace ptx {
namespace {

enum Operation { kAdd, kMin, kMax, kAnd, kOr, kXor, kExchange, kCompare, kIncrement, kDecrement };

template <class T>
T applied(Operation operation, T old, T value, T other) {
    using W = std::conditional_t<kIsFloat<T>, Wider<T>, T>;
    const W a = static_cast<W>(old), b = static_cast<W>(value);
    switch (operation) {
        case kAdd:
            if constexpr (std::is_integral_v<T>) {
                return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) +
                                      static_cast<std::make_unsigned_t<T>>(b));
            } else {
                return canonical(static_cast<T>(a + b));
            }
        case kMin: return b < a ? value : old;
        case kMax: return a < b ? value : old;
        case kExchange: return value;
        default: break;
    }
    if constexpr (std::is_integral_v<T>) {
        switch (operation) {
            case kAnd: return old & value;
            case kOr: return old | value;
            case kXor: return old ^ value;
            case kCompare: return old == value ? other : old;
            case kIncrement: return old >= value ? T(0) : static_cast<T>(old + 1);
            case kDecrement: return old == 0 || old > value ? value : static_cast<T>(old - 1);
            default: break;
        }
    }
    return old;
}

// setting[0]: the space; [1]: the operation; [2]: whether the old value is a result; [5]: see
// take_order.
template <class T, int E>
Next atomic(Warp& w, const Instruction& i) {
    constexpr uint32_t kSize = sizeof(T) * E;
    const size_t at = i.setting[2] ? 1 : 0;
    const auto operation = static_cast<Operation>(i.setting[1]);
    const auto addresses = w.addresses(i[at]);
    const auto values = w.values<T, E>(i[at + 1]);
    const auto others = i.size() > at + 2 ? w.values<T, E>(i[at + 2]) : values;
    std::array<T, kLanes * E> results{};
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        auto [space, address] = std::pair{static_cast<Space>(i.setting[0]), addresses[l]};
        if (space == Space::kGeneric) std::tie(space, address) = resolved(address);
        require_aligned(w, l, address, kSize);
        uint8_t bytes[kSize];
        const bool is_strong = !(i.setting[5] & kOfBlock);  // for other blocks
        const Access access = access_of(w, l, true);
        if (space == Space::kShared) {
            read_shared(w, l, address, kSize, bytes, access);
        } else {
            read_global(w, l, address, kSize, bytes, is_strong);
            if (is_strong) acquire_global(w, address, i);
        }
        T old[E], made[E];
        std::memcpy(old, bytes, kSize);
        for (int e = 0; e < E; ++e) {
            results[l * E + e] = old[e];
            // Sums of f32 in global memory flush subnormal numbers, those in shared memory do not.
            const bool flush = space != Space::kShared && operation == kAdd && sizeof(T) == 4;
            made[e] = flushed(applied(operation, flushed(old[e], flush),
                                      flushed(values[l * E + e], flush), others[l * E + e]),
                              flush);
        }
        w.polls = std::memcmp(bytes, made, kSize) == 0;
        std::memcpy(bytes, made, kSize);
        if (space == Space::kShared) {
            write_shared(w, l, address, kSize, bytes, access);
        } else {
            write_global(w, l, address, kSize, bytes, is_strong);
            if (is_strong) release_global(w, address, i, true);
        }
    }
    if (i.setting[2]) w.set_values<T, E>(i[0], results);
    return Next::kFollowing;
}

Execute decode_atomic(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    i.setting[0] = static_cast<int64_t>(take_space(m));
    i.setting[2] = i.opcode[0] == "atom";
    i.setting[5] = take_order(m);
    m.skip_hints();
    m.take("noftz");
    static const std::map<std::string, Operation> operations = {
        {"add", kAdd},       {"min", kMin},      {"max", kMax},       {"and", kAnd},
        {"or", kOr},         {"xor", kXor},      {"exch", kExchange}, {"cas", kCompare},
        {"inc", kIncrement}, {"dec", kDecrement}};
    const std::string name = m.pop_front();
    if (!operations.contains(name)) return nullptr;
    i.setting[1] = operations.at(name);
    const std::string type = m.type();
    if (Execute e =
            for_float(type, [](auto t, auto n) -> Execute { return atomic<decltype(t), n>; })) {
        return e;
    }
    return for_integer(type, [](auto t) -> Execute {
        if constexpr (sizeof(t) == 1)
            return nullptr;
        else
            return atomic<decltype(t), 1>;
    });
}

}  // namespace

void add_atomics(Decoders& all) {
    all["atom"] = decode_atomic;
    all["red"] = decode_atomic;
}

}  // namespace ptx
