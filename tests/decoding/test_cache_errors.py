"""Invalid settings of a cache raise one error that names the argument."""

from __future__ import annotations

import pytest
import torch

from biased_flash_attn import KVCache

CACHES = {
    "batch": (ValueError, "batch is 0; it may be 1 or more", {"batch": 0}),
    "kv_heads": (TypeError, "kv_heads is 2.0; it must be an int", {"kv_heads": 2.0}),
    "head_dim": (ValueError, "head_dim is 513; it may be 1 to 512", {"head_dim": 513}),
    "value_dim": (ValueError, "value_dim is 0; it may be 1 to 512", {"value_dim": 0}),
    "window": (ValueError, "window is 0; it may be 1 or more", {"window": 0}),
    "pages": (ValueError, "pages is -1; it may be 1 or more", {"pages": -1}),
    "small pages": (ValueError, "page_size is 8; it may be a power of two", {"page_size": 8}),
    "odd pages": (ValueError, "page_size is 48; it may be a power of two", {"page_size": 48}),
    "dtype": (TypeError, "dtype is torch.int8", {"dtype": torch.int8}),
    "table without pages": (
        ValueError,
        "block_table is given and pages is None",
        {"block_table": torch.zeros(2, 1).int()},
    ),
    "table of floats": (
        TypeError,
        "block_table is torch.float32; it must be an int32 tensor",
        {"block_table": torch.zeros(2, 1), "pages": 4},
    ),
    "table of another batch": (
        ValueError,
        r"block_table has shape \(1, 2\); it must be \(2, columns\)",
        {"block_table": torch.tensor([[0, 1]]), "pages": 4},
    ),
    "table points outside": (
        ValueError,
        r"block_table\[1, 0\] is 4; it may be a page, 0 to 3, or -1 for none",
        {"block_table": torch.tensor([[0, 1], [4, 2]]), "pages": 4},
    ),
    "table points below": (
        ValueError,
        r"block_table\[0, 1\] is -2",
        {"block_table": torch.tensor([[0, -2], [3, 2]]), "pages": 4},
    ),
    "table has a page twice": (
        ValueError,
        "block_table has page 2 more than once",
        {"block_table": torch.tensor([[0, 2], [3, 2]]), "pages": 4},
    ),
    "table too short for the window": (
        ValueError,
        r"block_table has shape \(2, 1\); it must be \(2, columns\), with 2 columns or more",
        {"block_table": torch.tensor([[0], [1]]), "pages": 4, "window": 65},
    ),
}


@pytest.mark.parametrize(("error", "message", "arguments"), CACHES.values(), ids=CACHES)
def test_invalid_caches_are_refused(error, message, arguments):
    with pytest.raises(error, match=message):
        KVCache(**{"batch": 2, "kv_heads": 2, "head_dim": 8} | arguments)
