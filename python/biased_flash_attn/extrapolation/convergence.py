"""Whether the series of a bias converges, according to its formula."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..biases.convergence import has_finite_sum, logarithmic_exponents
from ..biases.distance import PositionBias
from . import closed_forms

SUMMED = 16  # partial sums are computed up to 2^16 distances


@dataclass(frozen=True, eq=False)
class Convergence:
    """Whether the sum of exp(b(d)) over all d >= 0 is finite for each of H heads.

    Attributes:
        numeric: the verdict of the exponents, (H,) bool.
        exponents: p, q and r of exp(b(d)) ~ d^-p (ln d)^-q (ln ln d)^-r at d = 2^1000, (H, 3)
            float64.
        sums: the sums over d < 2^k for k = 0 to 16, (H, 17) float64, which cannot distinguish 1/n
            from 1/n^1.01.
        closed_form: the reason in closed form, with its verdict `known`, (H,) bool; both are None
            if there is none.
    """

    numeric: Tensor
    exponents: Tensor
    sums: Tensor
    closed_form: str | None
    known: Tensor | None

    @property
    def converges(self) -> Tensor:
        """The verdict, (H,) bool: that of the closed form if there is one."""
        return self.numeric if self.known is None else self.known

    def __str__(self) -> str:
        lines = [self.closed_form] if self.closed_form else []
        lines.append("head  series     p          q          r          sum to 65536")
        for h, converges in enumerate(self.converges.tolist()):
            # Adding 0 turns -0 into 0.
            exponents = "".join(f"{round(x, 6) + 0:<11.4g}" for x in self.exponents[h].tolist())
            verdict = "converges" if converges else "diverges"
            lines.append(f"{h:4}  {verdict:9}  {exponents}{self.sums[h, -1]:.6g}")
        return "\n".join(lines)


@torch.no_grad()
def convergence(bias: PositionBias) -> Convergence:
    """Whether the series of exp(b) converges: the condition of theorem 3.4 of Qin et al.,
    "Exploring Transformer Extrapolation", 2023.

    If it does, a layer is approximated at any length by the same layer with a sufficiently wide
    window. This does not say that a model trained at a shorter length extrapolates.

    The numeric verdict compares exp(b) with Bertrand's series, whose exponents are fitted to b at
    d = 2^125, 2^250, 2^500 and 2^1000. It is correct for every bias of the form
    -(p ln d + q ln ln d + r ln ln ln d) plus a term that has converged there, and for those that
    decay faster than any power of d or not at all. It cannot distinguish 1/n from series that
    differ by still slower factors, ignores distances beyond 2^1000 (where exp(-0.01 d^0.01) has
    hardly begun to decay), and may be wrong for an oscillating bias, as it evaluates only four
    distances. Partial sums are less informative: those of 1/(n ln n) diverge, but reach 4 only
    after some 10^22 terms.

    Raises TypeError for a bias that is not a function of the distance alone.
    """
    check_position_bias("bias", bias)
    exponents = logarithmic_exponents(bias.curve, bias.device)
    d = torch.arange(2**SUMMED, dtype=torch.float64, device=bias.device)
    sums = bias.curve(d).exp().cumsum(-1)[:, [2**k - 1 for k in range(SUMMED + 1)]]
    reason, known = closed_forms.verdict(bias) or (None, None)
    every_head = (bias.num_heads, -1)
    return Convergence(
        numeric=has_finite_sum(exponents).expand(bias.num_heads),
        exponents=exponents.expand(every_head),
        sums=sums.expand(every_head),
        closed_form=reason,
        known=known,
    )


def check_position_bias(name: str, bias) -> None:
    """Raises TypeError for biases without a formula of the distance, such as CABLE and FIRE."""
    if isinstance(bias, type) or not getattr(bias, "of_distance", False):
        raise TypeError(
            f"{name} is a {type(bias).__name__}; it must be a function of the distance alone, as"
            " ALiBi is. For other biases see attention_mass"
        )
