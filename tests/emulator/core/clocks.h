// Vector clocks, which represent the order of accesses by barriers and waits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace ptx {

// Agents access memory independently: warps, and the asynchronous engines that work for them. An
// agent's time increases whenever it releases its accesses to others.
struct Epoch {
    uint32_t agent = 0;
    uint32_t time = 0;
};

class Clock {
public:
    uint32_t operator[](uint32_t agent) const { return agent < times_.size() ? times_[agent] : 0; }

    void set(uint32_t agent, uint32_t time) {
        if (agent >= times_.size()) times_.resize(agent + 1);
        times_[agent] = std::max(times_[agent], time);
    }
    void join(const Clock& other) {
        if (other.times_.size() > times_.size()) times_.resize(other.times_.size());
        for (size_t i = 0; i < other.times_.size(); ++i) {
            times_[i] = std::max(times_[i], other.times_[i]);
        }
    }
    // The accesses known to both.
    void meet(const Clock& other) {
        for (size_t i = 0; i < times_.size(); ++i) {
            times_[i] = std::min(times_[i], other[static_cast<uint32_t>(i)]);
        }
    }
    bool covers(Epoch e) const { return (*this)[e.agent] >= e.time; }
    bool covers(const Clock& other) const {
        for (size_t i = 0; i < other.times_.size(); ++i) {
            if ((*this)[static_cast<uint32_t>(i)] < other.times_[i]) return false;
        }
        return true;
    }

private:
    std::vector<uint32_t> times_;
};

// A clock for each cluster, as agents have numbers within their cluster. Copies share their
// contents: knowledge is copied often, and few kernels synchronize clusters.
class ClusterClocks {
public:
    // nullptr if nothing of the cluster is known.
    const Clock* find(uint32_t cluster) const {
        if (!clocks_) return nullptr;
        const auto found = clocks_->find(cluster);
        return found == clocks_->end() ? nullptr : &found->second;
    }
    bool covers(uint32_t cluster, Epoch e) const {
        const Clock* clock = find(cluster);
        return clock && clock->covers(e);
    }
    bool is_empty() const { return !clocks_; }
    void join(uint32_t cluster, const Clock& clock) {
        Clocks made = clocks_ ? *clocks_ : Clocks{};
        made[cluster].join(clock);
        clocks_ = std::make_shared<const Clocks>(std::move(made));
    }
    void join(const ClusterClocks& other) {
        if (covers(other)) return;
        if (other.covers(*this)) {
            clocks_ = other.clocks_;
            return;
        }
        Clocks made = *clocks_;
        for (const auto& [cluster, clock] : *other.clocks_) made[cluster].join(clock);
        clocks_ = std::make_shared<const Clocks>(std::move(made));
    }
    void meet(const ClusterClocks& other) {
        if (other.covers(*this)) return;
        Clocks made;
        if (other.clocks_) made = *clocks_;
        std::erase_if(made, [&](const auto& one) { return !other.find(one.first); });
        for (auto& [cluster, clock] : made) clock.meet(*other.find(cluster));
        clocks_ = std::make_shared<const Clocks>(std::move(made));
    }

private:
    using Clocks = std::map<uint32_t, Clock>;

    bool covers(const ClusterClocks& other) const {
        if (clocks_ == other.clocks_ || !other.clocks_) return true;
        return std::all_of(other.clocks_->begin(), other.clocks_->end(), [&](const auto& one) {
            const Clock* own = find(one.first);
            return own && own->covers(one.second);
        });
    }

    std::shared_ptr<const Clocks> clocks_;
};

// The accesses ordered before those of an agent: `seen` for the generic proxy; `fenced`, followed
// by a proxy fence, also for the asynchronous proxy; and `others`, those of other clusters.
struct Knowledge {
    Clock seen, fenced;
    ClusterClocks others;

    void join(const Knowledge& other) {
        seen.join(other.seen);
        fenced.join(other.fenced);
        others.join(other.others);
    }
    void meet(const Knowledge& other) {
        seen.meet(other.seen);
        fenced.meet(other.fenced);
        others.meet(other.others);
    }
};

}  // namespace ptx
