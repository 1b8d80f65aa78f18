// No bias.
#pragma once

#include "base.h"

namespace bfa::BFA_KERNELS {

struct None : FormDefaults<None> {
    static constexpr FormTraits traits = {"none", {}};

    template <class Real>
    class Tile;
    template <class Real>
    class Page;
};

template <class Real>
class None::Tile : public TileDefaults {
public:
    struct Row {
        BFA_INLINE Vector<Real> added_to(Vector<Real> s, int) const { return s; }
    };

    Tile(Arena&, const Problem&, bool) {}
    void begin_head(int64_t, int64_t) {}
    void begin_tile(Range) {}
    template <class Function>
    BFA_INLINE void with_row(int64_t, Function function) const {
        function(Row{});
    }

    static constexpr bool has_gradient = false;
};

template <class Real>
class None::Page final : public PageBias<Real> {
public:
    Page(Arena&, const Decode& problem, int) : PageBias<Real>(problem) {}
    void fill(int, Range, const PageSlot&, Range, Real*) const override {}
    double highest(int, Range, const PageSlot&) const override { return 0; }
};

}  // namespace bfa::BFA_KERNELS
