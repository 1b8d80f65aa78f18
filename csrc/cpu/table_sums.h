// The gradient of a distance table that several sequences share. Each gathers its own, as long as
// its distances are many, and they are added up in the order of the sequences.
#pragma once

#include <cstring>

#include "../sequences.h"
#include "buffer.h"

namespace bfa::BFA_ISA {

template <class Real>
class TableSums {
public:
    explicit TableSums(const Backward& problem)
        : problem_(problem),
          apart_(facts_of(problem.form).is_shared && problem.has_form_gradient() &&
                 problem.batch > 1 && problem.grad_form[0].batch == 0),
          begins_(apart_ ? problem.batch + 1 : 0),
          sums_(apart_ ? elements() : 0) {
        if (apart_) std::memset(sums_.data(), 0, begins_.data()[problem.batch] * sizeof(Real));
    }

    bool apart() const { return apart_; }

    FormTensor of_sequence(int64_t b) const {
        const int64_t begin = begins_.data()[b], n = (begins_.data()[b + 1] - begin);
        const int64_t rows = n / problem_.heads;
        return {{reinterpret_cast<char*>(sums_.data() + begin), 0, rows * int64_t(sizeof(Real)),
                 int64_t(sizeof(Real))},
                rows};
    }

    void add_up() const {
        if (!apart_) return;
        for (int64_t b = 0; b < problem_.batch; ++b) {
            const Backward one = bfa::of_sequence(problem_, b);
            for (int64_t h = 0; h < problem_.heads; ++h) {
                const Real* own = of_sequence(b).template at<Real>(0, h);
                Real* sum = one.grad_form[0].template at<Real>(0, h);
                for (int64_t x = 0; x < one.grad_form[0].rows; ++x) sum[x] += own[x];
            }
        }
    }

private:
    int64_t elements() const {
        begins_.data()[0] = 0;
        for (int64_t b = 0; b < problem_.batch; ++b)
            begins_.data()[b + 1] =
                begins_.data()[b] +
                problem_.heads * bfa::of_sequence(problem_, b).grad_form[0].rows;
        return begins_.data()[problem_.batch];
    }

    const Backward& problem_;
    const bool apart_;
    const Buffer<int64_t> begins_;
    const Buffer<Real> sums_;
};

}  // namespace bfa::BFA_ISA
