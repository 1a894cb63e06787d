"""Ragged batches for kernels: sequences in a pool of which nothing else may ever be read.

All that no token stands in is NaN: the other blocks, and the rest of each last block. The block
tables are in random order, and hold garbage beyond what they need. The first and the last block of
the pool belong to sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.paged_cache import FLOAT8, PagedCache

GARBAGE = (-1, 2**30)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """T query tokens of S sequences."""

    query: Tensor  # (T, HQ, DK)
    cache: PagedCache
    block_tables: Tensor  # (S, B)
    query_start_loc: Tensor  # (S + 1,) int32
    seq_lens: Tensor  # (S,) int32

    @property
    def operands(self) -> tuple[Any, ...]:
        """As `reference.attend` and `attend_ragged` take them."""
        return (
            self.query,
            self.cache,
            self.block_tables,
            self.query_start_loc,
            self.seq_lens,
        )

    def alone(self, seq: int) -> PagedBatch:
        """One of the sequences, in the same pool."""
        first, last = self.query_start_loc[seq : seq + 2].tolist()
        return PagedBatch(
            self.query[first:last],
            self.cache,
            self.block_tables[seq : seq + 1],
            torch.tensor([0, last - first], dtype=torch.int32),
            self.seq_lens[seq : seq + 1],
        )


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    group: int = 3,
    num_kv_heads: int = 2,
    key_dim: int = 64,
    value_dim: int | None = None,
    block_size: int = 16,
) -> PagedBatch:
    """Sequences of `seq_lens` tokens, the last `query_lens` of which are queries."""
    num_blocks = [-(-n // block_size) for n in seq_lens]
    order = torch.randperm(sum(num_blocks))
    pool_size = sum(num_blocks) + 2
    order = torch.where(order == order.max(), pool_size - 1, order)  # the last block is owned
    width = max(num_blocks, default=0) + 2
    tables = torch.tensor(GARBAGE, dtype=torch.int32).repeat(len(seq_lens), width)[:, :width]
    is_owned = torch.zeros(pool_size, block_size, dtype=torch.bool)
    taken = 0
    for seq, (length, needed) in enumerate(zip(seq_lens, num_blocks, strict=True)):
        tables[seq, :needed] = order[taken : taken + needed]
        taken += needed
        positions = torch.arange(length)
        is_owned[tables[seq, positions // block_size].long(), positions % block_size] = True
    pools = [
        _pool(is_owned, num_kv_heads, dim, cache_dtype or dtype)
        for dim in (key_dim, value_dim or key_dim)
    ]
    scales = (torch.tensor([0.5]), torch.tensor([2.0])) if cache_dtype in FLOAT8 else (None, None)
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    return PagedBatch(
        torch.randn(sum(query_lens), num_kv_heads * group, key_dim).to(dtype),
        PagedCache(*pools, *scales),
        tables.contiguous(),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(seq_lens, dtype=torch.int32),
    )


def _pool(is_owned: Tensor, num_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    num_blocks, block_size = is_owned.shape
    numbers = torch.randn(num_blocks, num_heads, block_size, dim)
    return numbers.masked_fill(~is_owned[:, None, :, None], torch.nan).to(dtype)


TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of an attended number of size 1, by dtype of the query."""


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Fail unless all is finite and near what is expected."""
    assert actual.isfinite().all(), f"{int((~actual.isfinite()).sum())} numbers are not finite"
    worst = (actual.float() - expected.float()).abs().max().item()
    assert worst <= TOLERANCE[actual.dtype], f"off by {worst}"
