"""Context parallelism: attention to sequences that are sharded over ranks of
`torch.distributed`."""

from .context_parallel import context_parallel_attention
from .layout import positions, shard, unshard
from .ring import Traffic

__all__ = ["Traffic", "context_parallel_attention", "positions", "shard", "unshard"]
