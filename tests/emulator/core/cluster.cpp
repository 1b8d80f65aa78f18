// Addresses in other blocks of a cluster, and stores that complete on an mbarrier there.
#include "bulk.h"

namespace ptx {
namespace {

// setting[0]: whether addresses are generic.
Next map_address(Warp& w, const Instruction& i) {
    const auto addresses =
        i[1].kind == Operand::Kind::kAddress ? w.addresses(i[1]) : w.bits<uint64_t>(i[1]);
    const auto ranks = w.bits<uint32_t>(i[2]);
    Lanes<uint64_t> out{};
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        if (ranks[l] >= w.block.cluster.blocks.size()) {
            w.fault(kind::kInvalid, "the cluster has no block " + std::to_string(ranks[l]), l);
        }
        out[l] =
            in_block(shared_address(addresses[l]), ranks[l]) + (i.setting[0] ? kSharedWindow : 0);
    }
    w.set(i[0], out);
    return Next::kFollowing;
}

Next rank_of_address(Warp& w, const Instruction& i) {
    const auto addresses = w.bits<uint64_t>(i[1]);
    Lanes<uint32_t> out;
    for (int l = 0; l < kLanes; ++l)
        out[l] = static_cast<uint32_t>(shared_address(addresses[l]) >> kRankShift);
    w.set(i[0], out);
    return Next::kFollowing;
}

Execute decode_mapa(Modifiers& m, Instruction& i) {
    i.setting[0] = !m.take("shared::cluster");
    return bytes_of(m.type()) ? map_address : nullptr;
}

Execute decode_getctarank(Modifiers& m, Instruction&) {
    m.take("shared::cluster");
    return bytes_of(m.type()) ? rank_of_address : nullptr;
}

// setting[0]: bytes of an element; [1]: elements.
Next store(Warp& w, const Instruction& i) {
    const auto to = w.addresses(i[0]), signals = w.addresses(i[2]);
    const auto size = static_cast<uint32_t>(i.setting[0]), n = static_cast<uint32_t>(i.setting[1]);
    std::vector<Lanes<uint64_t>> values;
    if (i[1].kind != Operand::Kind::kVector) values.push_back(w.bits<uint64_t>(i[1]));
    for (const Operand& element : i[1].elements) values.push_back(w.bits<uint64_t>(element));
    if (values.size() != n)
        w.fault(kind::kUnsupported, "the numbers of registers and elements differ");
    for (int l = 0; l < kLanes; ++l) {
        if (!(w.active >> l & 1)) continue;
        require_aligned(w, l, to[l], size * n);
        std::array<uint8_t, 32> bytes;
        for (uint32_t e = 0; e < n; ++e) std::memcpy(bytes.data() + e * size, &values[e][l], size);
        const Signal signal = signal_at(w, l, shared_address(signals[l]));
        Access access = access_of(w, signal);
        access.is_async = false;  // it is an operation of the generic proxy
        uint8_t* target = begin_shared_write(w, l, shared_address(to[l]), size * n, access);
        land(w, signal, size * n,
             [target, bytes, all = size * n] { std::copy_n(bytes.data(), all, target); });
    }
    return Next::kFollowing;
}

Execute decode_async_store(Modifiers& m, Instruction& i) {
    i.is_visible = true;
    m.skip_hints();
    if (!m.take("mbarrier::complete_tx::bytes")) return nullptr;
    m.take("shared::cluster");
    const std::string vector = m.take_any({"v2", "v4"});
    i.setting[0] = bytes_of(m.type());
    i.setting[1] = vector.empty() ? 1 : vector[1] - '0';
    return i.setting[0] == 4 || i.setting[0] == 8 ? store : nullptr;
}

}  // namespace

void add_clusters(Decoders& all) {
    all["mapa"] = decode_mapa;
    all["getctarank"] = decode_getctarank;
    all["st.async"] = decode_async_store;
}

}  // namespace ptx
