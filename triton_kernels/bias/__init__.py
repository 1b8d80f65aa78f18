"""The bias of a tile, computed pair by pair or by a matrix product."""
