"""Block tables: which blocks hold a row's tokens, in order.

A mirror of what the scheduler decided; gives out no block itself. Lives on the host, where steps
change it a few entries at a time; each step sends the part that it needs to the device.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class ProtocolError(Exception):
    """A step does not fit what this worker holds; the text says where. It must not be run."""


class BlockTable:
    """A table of `num_rows` rows; entries of a row beyond its `lengths` mean nothing."""

    def __init__(self, num_rows: int, max_blocks: int, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.lengths: IntArray = np.zeros(num_rows, dtype=np.int64)  # blocks of each row
        self._num_blocks = num_blocks
        self._table: IntArray = np.zeros((num_rows, max_blocks), dtype=np.int64)

    def clear(self, row: int) -> None:
        """Empty a row."""
        self.lengths[row] = 0

    def blocks(self, row: int) -> list[int]:
        """The blocks of a row, in order."""
        return [int(block) for block in self._table[row, : self.lengths[row]]]

    def append(self, row: int, block_ids: list[int]) -> None:
        """Add blocks to the end of a row. Raises ProtocolError if they cannot be right."""
        if not block_ids:
            return
        if min(block_ids) < 0 or max(block_ids) >= self._num_blocks:
            raise ProtocolError(f"blocks {block_ids[:8]}: there are {self._num_blocks}")
        start = int(self.lengths[row])
        end = start + len(block_ids)
        if end > self._table.shape[1]:
            raise ProtocolError(f"{end} blocks for a request: it can have {self._table.shape[1]}")
        self._table[row, start:end] = block_ids
        self.lengths[row] = end

    def holds(self, rows: IntArray, num_tokens: IntArray) -> NDArray[np.bool_]:
        """Whether the blocks of each row (S,) have room for so many tokens (S,)."""
        return self.lengths[rows] * self.block_size >= num_tokens

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Slots of the cache for positions (T,) of rows (T,): block id * block_size + offset."""
        blocks = self._table[rows, positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def of(self, rows: IntArray, num_columns: int) -> IntArray:
        """The first blocks of rows (S,): (S, num_columns)."""
        return self._table[rows, :num_columns]
