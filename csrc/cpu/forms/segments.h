// The piecewise linear function of the normalized form.
#pragma once

#include <algorithm>
#include <limits>

namespace bfa::BFA_KERNELS {

// The function of one head. On segment s, where knots[s - 1] <= x < knots[s], it is
// intercepts[s] + slopes[s] x. The first and the last segment are unbounded.
template <class Real>
struct Segments {
    static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

    int count;
    const Real *knots, *slopes, *intercepts;

    Real lower(int segment) const { return segment == 0 ? -kInfinity : knots[segment - 1]; }
    Real upper(int segment) const { return segment + 1 == count ? kInfinity : knots[segment]; }

    // Returns the segment of x. The search is linear and starts at a segment that is likely near.
    template <class Number>
    int find(Number x, int near) const {
        while (near > 0 && x < Number(knots[near - 1])) --near;
        while (near + 1 < count && x >= Number(knots[near])) ++near;
        return near;
    }

    double value(double x, int segment) const {
        return double(intercepts[segment]) + double(slopes[segment]) * x;
    }

    // Returns the maximum over [low, high], or NaN if there is none.
    double maximum(double low, double high) const {
        int segment = int(std::upper_bound(knots, knots + count - 1, low) - knots);
        double largest = value(low, segment);
        for (; segment + 1 < count && high >= double(knots[segment]); ++segment)
            largest = std::max(value(double(knots[segment]), segment), largest);
        return std::max(value(high, segment), largest);
    }
};

}  // namespace bfa::BFA_KERNELS
