// Reads and writes of registers by warps.
#pragma once

namespace ptx {

template <class U>
Lanes<U> filled(U value) {
    Lanes<U> lanes;
    lanes.fill(value);
    return lanes;
}

template <class U>
Lanes<U> Warp::bits(const Operand& o) const {
    Lanes<U> out;
    switch (o.kind) {
        case Operand::Kind::kRegister: {
            note_unknown(o);
            const uint8_t* source = registers_.data() + o.offset;
            if (o.width == 8 * sizeof(U)) {
                std::memcpy(out.data(), source, sizeof out);
            } else if (o.width == 16) {
                Lanes<uint16_t> wide;
                std::memcpy(wide.data(), source, sizeof wide);
                for (int l = 0; l < kLanes; ++l) out[l] = static_cast<U>(wide[l]);
            } else if (o.width == 32) {
                Lanes<uint32_t> wide;
                std::memcpy(wide.data(), source, sizeof wide);
                for (int l = 0; l < kLanes; ++l) out[l] = static_cast<U>(wide[l]);
            } else if (o.width == 64) {
                Lanes<uint64_t> wide;
                std::memcpy(wide.data(), source, sizeof wide);
                for (int l = 0; l < kLanes; ++l) out[l] = static_cast<U>(wide[l]);
            } else {
                fault(kind::kUnsupported, "register of the wrong width");
            }
            return out;
        }
        case Operand::Kind::kInteger: return filled(static_cast<U>(o.value));
        case Operand::Kind::kShared: return filled(static_cast<U>(block.shared_base() + o.value));
        case Operand::Kind::kParameter: return filled(static_cast<U>(o.value));
        case Operand::Kind::kSpecial: {
            const auto wide = special64(o.special);
            for (int l = 0; l < kLanes; ++l) out[l] = static_cast<U>(wide[l]);
            return out;
        }
        case Operand::Kind::kSink: return filled(U{0});
        default: fault(kind::kUnsupported, "unsupported kind of operand");
    }
}

template <class T, int E>
std::array<T, kLanes * E> Warp::values(const Operand& o) const {
    if (o.kind == Operand::Kind::kReal) {
        std::array<T, kLanes * E> out;
        out.fill(static_cast<T>(o.real));
        return out;
    }
    return std::bit_cast<std::array<T, kLanes * E>>(bits<Bits<T, E>>(o));
}

template <class U>
void Warp::set(const Operand& o, const Lanes<U>& values) {
    if (o.kind == Operand::Kind::kSink) return;
    if (o.kind != Operand::Kind::kRegister) fault(kind::kUnsupported, "result is not a register");
    defined_[o.number] = (defined_[o.number] | active) & ~(unknown & active);
    unfenced[o.number] = true;
    uint8_t* target = registers_.data() + o.offset;
    const auto store = [&]<class R>(R) {
        if (active == kAllLanes && sizeof(R) == sizeof(U)) {
            std::memcpy(target, values.data(), sizeof values);
            return;
        }
        Lanes<R> whole;
        std::memcpy(whole.data(), target, sizeof whole);
        for (int l = 0; l < kLanes; ++l) {
            if (active >> l & 1) whole[l] = static_cast<R>(values[l]);
        }
        std::memcpy(target, whole.data(), sizeof whole);
    };
    if (o.width == 16) return store(uint16_t{});
    if (o.width == 32) return store(uint32_t{});
    if (o.width == 64) return store(uint64_t{});
    fault(kind::kUnsupported, "register of the wrong width");
}

template <class T, int E>
void Warp::set_values(const Operand& o, const std::array<T, kLanes * E>& values) {
    set(o, std::bit_cast<Lanes<Bits<T, E>>>(values));
}

template <class U>
U Warp::uniform(const Operand& o) const {
    const auto all = bits<U>(o);
    const U value = all[first_lane()];
    for (int l = 0; l < kLanes; ++l) {
        if (active >> l & 1 && all[l] != value) {
            fault(kind::kInvalid, "operand must be the same in all lanes", l);
        }
    }
    return value;
}

}  // namespace ptx
