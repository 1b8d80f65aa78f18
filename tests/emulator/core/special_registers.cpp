// Special registers, such as %tid, %ctaid and %laneid.
#include "machine.h"

namespace ptx {

Lanes<uint64_t> Warp::special64(const std::string& name) const {
    const Launch& launch = block.cluster.launch;
    const Cluster& cluster = block.cluster;
    const auto coordinate = [&](const Dim& d) -> uint64_t {
        return name.back() == 'x' ? d.x : name.back() == 'y' ? d.y : d.z;
    };
    const std::string stem = name.substr(0, name.find('.'));
    Lanes<uint64_t> out;
    for (int l = 0; l < kLanes; ++l) {
        const uint32_t thread = static_cast<uint32_t>(index * kLanes + l);
        if (stem == "%tid") {
            out[l] = coordinate(launch.block.at(thread));
        } else if (name == "%laneid") {
            out[l] = l;
        } else if (name == "%lanemask_eq") {
            out[l] = 1u << l;
        } else if (name == "%lanemask_lt") {
            out[l] = (1u << l) - 1;
        } else if (name == "%lanemask_le") {
            out[l] = (2ull << l) - 1;
        } else if (name == "%lanemask_gt") {
            out[l] = static_cast<uint32_t>(~((2ull << l) - 1));
        } else if (name == "%lanemask_ge") {
            out[l] = static_cast<uint32_t>(~((1ull << l) - 1));
        } else {
            break;
        }
        if (l == kLanes - 1) return out;
    }
    uint64_t value;
    if (stem == "%ntid") {
        value = coordinate(launch.block);
    } else if (stem == "%ctaid") {
        value = coordinate(block.index);
    } else if (stem == "%nctaid") {
        value = coordinate(launch.grid);
    } else if (stem == "%clusterid") {
        value = coordinate({block.index.x / launch.cluster.x, block.index.y / launch.cluster.y,
                            block.index.z / launch.cluster.z});
    } else if (stem == "%nclusterid") {
        value = coordinate({launch.grid.x / launch.cluster.x, launch.grid.y / launch.cluster.y,
                            launch.grid.z / launch.cluster.z});
    } else if (stem == "%cluster_ctaid") {
        value = coordinate(launch.cluster.at(block.rank));
    } else if (stem == "%cluster_nctaid") {
        value = coordinate(launch.cluster);
    } else if (name == "%cluster_ctarank") {
        value = block.rank;
    } else if (name == "%cluster_nctarank") {
        value = launch.cluster.count();
    } else if (name == "%is_explicit_cluster") {
        value = launch.cluster.count() > 1;
    } else if (name == "%warpid") {
        value = index;
    } else if (name == "%nwarpid") {
        value = cluster.warps_per_block();
    } else if (name == "%smid") {
        value = block.linear_index() % 132;
    } else if (name == "%nsmid") {
        value = 132;
    } else if (name == "%gridid") {
        value = 1;
    } else if (name == "%clock" || name == "%clock64" || name == "%globaltimer" ||
               name == "%clock_hi" || name == "%globaltimer_lo") {
        value = ++block.cluster.launch.ticks;
    } else if (name == "%dynamic_smem_size") {
        value = launch.shared_bytes - launch.program.static_shared_bytes;
    } else if (name == "%total_smem_size") {
        value = launch.shared_bytes;
    } else {
        fault(kind::kUnsupported, "special register " + name);
    }
    return filled(value);
}

}  // namespace ptx
