"""The piecewise linear function of the normalized form, evaluated on a tile.

On segment s, where knots[s - 1] <= x < knots[s], it is intercepts[s] + slopes[s] x. The values of a
tile are in few segments, often in one, and only these are iterated over. h is the head of the tile
or, in decoding, a column with the head of each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import INFINITY, LOWEST, limited, row_address


@triton.jit
def segment_range(function, lowest, highest):
    """Returns the segments of two numbers."""
    s = tl.arange(0, function.segments)
    exists = s < function.knot_count
    knots = tl.load(function.knots.start + s, exists, other=INFINITY)
    first = tl.sum((exists & (knots <= lowest)).to(tl.int32), 0)
    last = tl.sum((exists & (knots <= highest)).to(tl.int32), 0)
    return first, last


@triton.jit
def line_of(function, b, h, s, x, reach):
    """Returns the line of segment s at each element of a tile x, whose magnitudes are at most
    `reach`. Where all operands are finite, float32 values are too, also in base 2."""
    intercept = tl.load(row_address(function.intercepts, b, h, 0) + s)
    slope = tl.load(row_address(function.slopes, b, h, 0) + s)
    values = intercept + slope * x
    if x.dtype == tl.float32:
        largest = -LOWEST / 2
        if tl.abs(intercept) + tl.abs(slope) * reach > largest:
            magnitude = tl.maximum(tl.maximum(tl.abs(intercept), tl.abs(slope)), tl.abs(x))
            values = tl.where(magnitude == INFINITY, values, limited(values, largest))
    return values


@triton.jit
def values_of(function, b, h, x):
    """Returns the function's value at each element of a tile x."""
    lowest, highest = tl.min(x), tl.max(x)
    first, last = segment_range(function, lowest, highest)
    reach = tl.maximum(tl.abs(lowest), tl.abs(highest))
    values = line_of(function, b, h, first, x, reach)
    for s in range(first + 1, last + 1):
        reached = x >= tl.load(function.knots.start + (s - 1))
        values = tl.where(reached, line_of(function, b, h, s, x, reach), values)
    return values


@triton.jit
def slopes_of(function, b, h, x):
    """Returns the slope of the segment that each element of a tile x is in."""
    first, last = segment_range(function, tl.min(x), tl.max(x))
    slopes = row_address(function.slopes, b, h, 0)
    slope = tl.zeros_like(x) + tl.load(slopes + first)
    for s in range(first + 1, last + 1):
        reached = x >= tl.load(function.knots.start + (s - 1))
        slope = tl.where(reached, tl.load(slopes + s), slope)
    return slope


@triton.jit
def largest_value(function, b, h, low, high):
    """Returns the maximum of the function over [low, high], for each element of two tiles."""
    largest = tl.maximum(values_of(function, b, h, low), values_of(function, b, h, high))
    slopes = row_address(function.slopes, b, h, 0)
    intercepts = row_address(function.intercepts, b, h, 0)
    first, last = segment_range(function, tl.min(low), tl.max(high))
    for s in range(first, last):
        knot = tl.load(function.knots.start + s).to(low.dtype)
        value = tl.load(intercepts + s) + tl.load(slopes + s) * knot
        largest = tl.where((low < knot) & (knot < high), tl.maximum(largest, value), largest)
    return largest


@triton.jit
def add_segment_gradients(head, t, gain, grad_s, grad_gain, grad_lines):
    """Adds the gradients that a tile of dS contributes to the gains, and to the intercepts [0] and
    the slopes [1] of the segments; t holds the table's values. [BLOCK_M], [2, segments]"""
    x = gain[:, None] * t
    first, last = segment_range(head.bias.function, tl.min(x), tl.max(x))
    slopes = row_address(head.bias.function.slopes, head.b, head.h, 0)
    segment = tl.arange(0, head.bias.function.segments)[None, :]
    is_slope = tl.arange(0, 2)[:, None] == 1
    for s in range(first, last + 1):
        lower = tl.load(head.bias.function.knots.start + (s - 1), s > first, other=-INFINITY)
        upper = tl.load(head.bias.function.knots.start + s, s < last, other=INFINITY)
        grad_values = tl.where((lower <= x) & (x < upper), grad_s, 0.0)
        grad_x = tl.sum(grad_values * t, 1)
        grad_gain += tl.load(slopes + s) * grad_x
        grad_slope, grad_intercept = tl.sum(grad_x * gain, 0), tl.sum(tl.sum(grad_values, 1), 0)
        grad_line = tl.where(is_slope, grad_slope, grad_intercept)
        grad_lines += tl.where(segment == s, grad_line, 0.0)
    return grad_gain, grad_lines
