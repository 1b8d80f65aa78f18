// Vector clocks, which represent the order of accesses by barriers and waits.
#pragma once

#include <algorithm>
#include <cstdint>
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

private:
    std::vector<uint32_t> times_;
};

// The accesses ordered before those of an agent: `seen` for the generic proxy; `fenced`, followed
// by a proxy fence, also for the asynchronous proxy.
struct Knowledge {
    Clock seen, fenced;

    void join(const Knowledge& other) {
        seen.join(other.seen);
        fenced.join(other.fenced);
    }
    void meet(const Knowledge& other) {
        seen.meet(other.seen);
        fenced.meet(other.fenced);
    }
};

}  // namespace ptx
