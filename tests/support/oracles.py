"""Every bias as its paper defines it, for one pair of positions at a time.

p is the position of the query, j that of the key, h the head, from 0. Parameters are a dictionary
of float64 tensors, so that autograd through an oracle returns the expected gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Parameters = dict[str, Tensor]
Entry = Callable[[int, int, int], Tensor | float]


def every_pair(entry: Entry, num_heads: int, n_query: int, n_key: int) -> Tensor:
    """entry(h, p, j) for all heads and pairs, (num_heads, n_query, n_key) float64."""
    positions = range(n_key - n_query, n_key)
    entries = [
        torch.as_tensor(entry(h, p, j), dtype=torch.float64)
        for h in range(num_heads)
        for p in positions
        for j in range(n_key)
    ]
    return torch.stack(entries).reshape(num_heads, n_query, n_key)


# Biases of the distance: (parameters, num_heads, h, p, j) to a logit.


def published_slopes(num_heads: int) -> list[float]:
    """The recursion of the ALiBi authors."""
    if num_heads & (num_heads - 1) == 0:
        ratio = 2 ** (-8 / num_heads)
        return [ratio**n for n in range(1, num_heads + 1)]
    below = 1
    while 2 * below < num_heads:
        below *= 2
    return published_slopes(below) + published_slopes(2 * below)[0::2][: num_heads - below]


def geometric_slopes(num_heads: int) -> list[float]:
    """The slopes of the Sandwich paper, for any number of heads."""
    return [1 / 2 ** (8 * n / num_heads) for n in range(1, num_heads + 1)]


def alibi(shift: float = 0.0, exponent: float | None = None, slopes=published_slopes):
    def entry(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
        slope = slopes(num_heads)[h] if exponent is None else 1 / 2**exponent
        return -slope / 2**shift * abs(p - j)

    return entry


def alibi_trained(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
    return -parameters["slopes"][h] * abs(p - j)


def kerple_log(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
    return -parameters["r1"][h] * torch.log(1 + parameters["r2"][h] * abs(p - j))


def kerple_power(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
    distance = abs(p - j)
    if distance == 0:
        return 0 * parameters["r1"][h]
    return -parameters["r1"][h] * torch.exp(parameters["r2"][h] * math.log(distance))


def fire(init_length: float):
    def bias(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
        c, length = parameters["c"].abs(), (parameters["L_multiplier"] * init_length).abs()
        longest = length.clamp(min=float(p))
        x = torch.log(1 + c * abs(p - j)) / (torch.log(1 + c * longest) + 1e-6)
        hidden = parameters["mlp.0.weight"][:, 0] * x + parameters["mlp.0.bias"]
        return parameters["mlp.2.weight"][h] @ hidden.relu() + parameters["mlp.2.bias"][h]

    return bias


def sinusoidal_embedding(position: int, dbar: int, first: int) -> list[float]:
    angles = [position / 10000 ** (2 * i / dbar) for i in range(first, first + dbar // 2)]
    return [math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles]


def sandwich(dbar: int = 128, first: int = 1):
    def entry(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
        query, key = sinusoidal_embedding(p, dbar, first), sinusoidal_embedding(j, dbar, first)
        product = math.fsum(a * b for a, b in zip(query, key, strict=True))
        trained = parameters.get("ratios")
        ratio = (h + 1) * 8 / num_heads if trained is None else trained[h]
        return (product - dbar / 2) / ratio

    return entry


def smoothed_sandwich(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
    curve_at_ratio_8 = -0.825 * math.log(1 + abs(p - j)) - 0.8
    return curve_at_ratio_8 * 8 / ((h + 1) * 8 / num_heads)


def type1(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
    n = abs(p - j) + 1
    return math.log(1 / n**2)


def type2(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
    n = abs(p - j) + 1
    return -(math.log(n) ** 2)


def inverse_distance(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
    n = abs(p - j) + 1
    return math.log(1 / n)


def inverse_log_distance(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
    n = abs(p - j) + 3
    return math.log(1 / (n * math.log(n)))


def scaled(term: Callable[[float], float], slopes: Callable[[int], list[float]]):
    """A series bias whose distance is multiplied by a slope per head."""

    def entry(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
        return term(slopes(num_heads)[h] * abs(p - j))

    return entry


def t5_bucket(ahead: int, bidirectional: bool, num_buckets: int, max_distance: int) -> int:
    """T5's rule, for a key that is `ahead` positions after the query.

    The logarithmic bucket is found by comparing whole numbers: the largest k for which
    n / exact >= (max_distance / exact)^(k / wide).
    """
    first, n = 0, -ahead
    if bidirectional:
        num_buckets //= 2
        first, n = (num_buckets if n < 0 else 0), abs(n)
    n = max(n, 0)
    exact = num_buckets // 2
    if n < exact:
        return first + n
    wide = num_buckets - exact
    k = 0
    while k + 1 < wide and n**wide * exact ** (k + 1) >= max_distance ** (k + 1) * exact**wide:
        k += 1
    return first + exact + k


def t5(bidirectional: bool = False, num_buckets: int = 32, max_distance: int = 128):
    def entry(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
        return parameters["r"][h, t5_bucket(j - p, bidirectional, num_buckets, max_distance)]

    return entry


def clipped_table(max_distance: int):
    def entry(parameters: Parameters, num_heads: int, h: int, p: int, j: int):
        return parameters["r"][h, min(abs(p - j), max_distance)]

    return entry


# Biases of the content: (parameters, x of one sequence (N, dim), h, p, j) to a logit.


def relu(z: Tensor) -> Tensor:
    return z if z > 0 else 0 * z


def softplus(z: Tensor) -> Tensor:
    return torch.log(1 + torch.exp(z))


def prefix_sums(values: list[Tensor]) -> list[Tensor]:
    """CABLE's S = L f, with its triangle of ones L (eq. 3 and 4)."""
    n = len(values)
    triangle = [[1 if t <= i else 0 for t in range(n)] for i in range(n)]
    return [sum(row[t] * values[t] for t in range(n)) for row in triangle]


def projected(parameters: Parameters, layer: str, row: Tensor, h: int) -> Tensor:
    """The output h of a linear layer, with or without a bias."""
    offset = parameters.get(f"{layer}.bias", torch.zeros(h + 1, dtype=row.dtype))[h]
    return torch.dot(row, parameters[f"{layer}.weight"][h]) + offset


def cable(activation: Callable = relu, weighted: bool = True, kernel: bool = False):
    def entry(parameters: Parameters, x: Tensor, h: int, p: int, j: int):
        f = [activation(projected(parameters, "w_c", row, h)) for row in x]
        sums = prefix_sums(f)
        # The paper is causal; the bias of a key after the query is symmetric.
        beta = sums[p] - sums[j] if p >= j else sums[j] - sums[p]
        if weighted:
            beta = softplus(projected(parameters, "w_s", x[p], h)) * beta
        return -torch.log(1 + beta**2) if kernel else -beta

    return entry


def forget_gate(parameters: Parameters, x: Tensor, h: int, p: int, j: int):
    """The log of the product of the gates between the two positions."""
    kept = torch.ones((), dtype=torch.float64)
    for t in range(min(p, j) + 1, max(p, j) + 1):
        z = torch.dot(x[t], parameters["gate.weight"][h]) + parameters["gate.bias"][h]
        kept = kept / (1 + torch.exp(-z))
    return torch.log(kept)


def cumulative(steps: Tensor, gain: Tensor | None, kernel: bool, b: int) -> Entry:
    """Explicit sums of the steps between two positions, of sequence b."""

    def entry(h: int, p: int, j: int):
        n_key = steps.shape[-1]
        between = range(max(0, min(p, j) + 1), max(p, j) + 1)
        beta = sum((steps[b, h, t] for t in between), start=0 * steps[b, h, 0])
        if gain is not None:
            # The last query is aligned with the last key.
            beta = gain[b, h, p - n_key] * beta
        return -torch.log(1 + beta**2) if kernel else beta

    return entry
