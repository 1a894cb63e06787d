"""What all layers of a step share: which blocks are brought together, and what of them is seen.

Pure planning on the host, made once for each sliding window in a step.

    block table      3  7  5  null         a shorter sequence is padded with the null block
    brought together      [ 3 | 7 | 5.. | 0 ]   L tokens
                                    ^ beyond the length: whatever a former owner left. It is zeroed,
                                      for a masked NaN would still be NaN, and masked
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata, IntArray


@dataclass(frozen=True, slots=True)
class Group:
    """N sequences of one query token each and of similar lengths, padded to B blocks = L tokens."""

    tokens: Tensor | slice  # (N,) int64: where their query tokens are in the step
    blocks: Tensor  # (N, B) int64
    mask: Tensor  # (N, 1, 1, L): 0 or -inf
    stale: (
        Tensor  # (X, 2) int64: (sequence, token) of what stands beyond a length in its last block
    )


@dataclass(frozen=True, slots=True)
class Stretch:
    """One sequence with several query tokens: the last of its L gathered tokens."""

    tokens: slice  # where its query tokens are in the step
    blocks: Tensor  # (1, B) int64
    num_keys: int  # L


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step brings together for the layers with one sliding window."""

    groups: list[Group]
    stretches: list[Stretch]


@dataclass(frozen=True, slots=True)
class Planner:
    """Makes plans for one cache."""

    block_size: int
    null_block: int  # a block of zeros
    blocks_per_group: int  # most blocks that one group may bring together
    dtype: torch.dtype
    device: torch.device

    def plan(self, metadata: AttentionMetadata, window: int | None) -> Plan:
        """Plan one step; a layer with a window needs only the blocks that some query can see."""
        starts, lens = metadata.query_start_loc[:-1], metadata.seq_lens
        num_queries = np.diff(metadata.query_start_loc)
        first_seen = lens - num_queries + 1 - window if window else np.zeros_like(lens)
        first_blocks = np.maximum(first_seen, 0) // self.block_size
        num_blocks = -(-lens // self.block_size) - first_blocks
        plan = Plan([], [])
        single = np.flatnonzero(num_queries == 1)
        for members in _similar(single, num_blocks[single], self.blocks_per_group):
            rows = metadata.block_tables[self._tensor(members)]
            plan.groups.append(
                self._group(starts[members], lens[members], first_blocks[members], rows, window)
            )
        for i in np.flatnonzero(num_queries > 1):
            tokens = slice(int(starts[i]), int(starts[i] + num_queries[i]))
            first, last = int(first_blocks[i]), int(first_blocks[i] + num_blocks[i])
            blocks = metadata.block_tables[i : i + 1, first:last]
            num_keys = int(lens[i]) - first * self.block_size
            plan.stretches.append(Stretch(tokens, blocks, num_keys))
        return plan

    def _group(
        self,
        tokens: IntArray,
        lens: IntArray,
        first_blocks: IntArray,
        block_tables: Tensor,
        window: int | None,
    ) -> Group:
        size = self.block_size
        num_blocks = int((-(-lens // size) - first_blocks).max())
        columns = first_blocks[:, None] + np.arange(num_blocks)  # (N, B)
        is_held = columns * size < lens[:, None]  # beyond, a block table holds garbage
        held = self._tensor(is_held)
        blocks = block_tables.gather(1, self._tensor(np.where(is_held, columns, 0)))
        positions = first_blocks[:, None] * size + np.arange(num_blocks * size)  # (N, L)
        is_written = positions < lens[:, None]
        is_seen = is_written & (positions >= lens[:, None] - window) if window else is_written
        mask = np.where(is_seen, np.float32(0), np.float32(-np.inf))
        stale = np.argwhere(~is_written & np.repeat(is_held, size, axis=1))
        is_run = tokens[-1] - tokens[0] + 1 == len(tokens)  # members are in order, or sorted anew
        return Group(
            slice(int(tokens[0]), int(tokens[-1]) + 1) if is_run else self._tensor(tokens),
            torch.where(held, blocks, self.null_block),
            self._tensor(mask).to(self.dtype)[:, None, None, :],
            self._tensor(stale),
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _similar(members: IntArray, num_blocks: IntArray, limit: int) -> Iterator[IntArray]:
    """Split sequences into groups in which padding at most doubles the work and `limit` holds.

    One sequence alone may be beyond the limit. Each group is in the order of the step.
    """
    remaining = np.argsort(-num_blocks, kind="stable")
    while len(remaining):
        longest = int(num_blocks[remaining[0]])
        size = int(np.count_nonzero(num_blocks[remaining] * 2 >= longest))
        size = min(size, max(limit // longest, 1))
        yield members[np.sort(remaining[:size])]
        remaining = remaining[size:]
