"""Appends new tokens to a paged cache."""

from __future__ import annotations

import triton
import triton.language as tl

from ..primitives import row_address


@triton.jit
def attn_append_kernel(
    pages,
    x,
    block_table,
    lengths,
    columns,
    page_size,
    heads,
    tokens,
    channels,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """pages[block_table[b, c], h, r] = x[b, h, n] for key j = lengths[b] - tokens + n of sequence
    b, with column c = j // page_size % columns and row r = j % page_size.

    x (B, heads, tokens, channels), pages (pages, heads, page_size, channels).
    """
    blocks = tl.cdiv(tokens, TOKENS)
    program, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    b, h = program // heads, program % heads
    n = block * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, CHANNELS)[None, :]
    exists = n < tokens
    key = tl.load(lengths + b) - tokens + n
    column = key // page_size % columns
    page = tl.load(block_table + b * columns + column, exists, other=0)
    copied = exists[:, None] & (channel < channels)
    # [TOKENS, CHANNELS]
    values = tl.load(row_address(x, b, h, n)[:, None] + channel, copied)
    tl.store(row_address(pages, page, h, key % page_size)[:, None] + channel, values, copied)
