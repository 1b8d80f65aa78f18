// All forms, each of which has a header of its own. To be in this list is all that a form needs for
// every kernel to support it.
#pragma once

#include "cumulative.h"
#include "dense.h"
#include "distance.h"
#include "linear.h"
#include "none.h"
#include "normalized.h"
#include "relative.h"

namespace bfa::BFA_KERNELS {

template <class... Form>
struct FormList {
    static constexpr int kCount = sizeof...(Form);
};

using Forms = FormList<None, Linear, Distance, Cumulative, Log1pSquare, Dense, Normalized, Relative,
                       RelativeLast>;

}  // namespace bfa::BFA_KERNELS
