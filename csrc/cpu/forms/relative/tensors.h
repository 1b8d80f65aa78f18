// What the parts of the relative forms share.
#pragma once

#include <cstring>

#include "../../../problem.h"

namespace bfa::BFA_KERNELS {

struct RelativeTensors {
    // A term that is absent has a table without rows.
    enum Tensor { kQueryFactors, kQueryTable, kKeyFactors, kKeyTable };

    static constexpr const char *kZeroBeyond = "relative", *kLastBeyond = "relative_last";

    // Whether distances beyond a table have its nearest column instead of zeros.
    static bool repeats_ends(const Problem& problem) {
        return std::strcmp(problem.form->name, kLastBeyond) == 0;
    }
};

}  // namespace bfa::BFA_KERNELS
