"""Some heads of a bias, for tensor parallelism."""

from __future__ import annotations


def of_heads(bias, start: int, stop: int):
    """The bias of the heads start, ..., stop - 1, as a bias of stop - start heads.

    Slopes and ratios are those that the heads have in the whole bias; a new bias of fewer heads
    would have different ones. The parameters are those of the whole bias and receive gradients from
    these heads only.

    bias: a bias of positions, a `CumulativeBias` or a `RelativeBias`. Call a module such as `Cable`
        first.

    Raises TypeError for other arguments, and ValueError for an invalid range of heads.
    """
    if isinstance(bias, type) or not (hasattr(bias, "for_heads") and hasattr(bias, "num_heads")):
        raise TypeError(
            f"bias is a {type(bias).__name__}; it must be a bias of positions, a CumulativeBias or"
            " a RelativeBias"
        )
    if not 0 <= start < stop <= bias.num_heads:
        raise ValueError(
            f"start and stop are {start} and {stop}; they must be 0 <= start < stop <="
            f" {bias.num_heads}, the number of heads of the bias"
        )
    return bias.for_heads(slice(start, stop))
