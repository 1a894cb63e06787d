"""Batches of random numbers for the kernels of a GPU: what is checked, and what is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.decode_attention import attend_decodes
from kernels.decode_plan import plan_decodes
from kernels.paged_cache import FLOAT8, PagedCache
from kernels.prefill_attention import attend_ragged

BFLOAT16 = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model."""

    query_heads: int
    kv_heads: int
    dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    block_size: int = 16


LARGE = Sizes(32, 8, 128, 4096, 14336, 128256)
TINY = Sizes(3, 1, 64, 64, 64, 1000)


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences in a pool of random numbers."""

    query: Tensor  # (T, HQ, DK)
    cache: PagedCache
    block_tables: Tensor  # (S, B) int32
    query_lens: list[int]
    seq_lens: list[int]

    @property
    def scale(self) -> float:
        """Of the scores."""
        return float(self.query.shape[2] ** -0.5)

    @property
    def starts(self) -> Tensor:
        """(S + 1,) int32."""
        starts = np.cumsum([0, *self.query_lens])
        return torch.tensor(starts, dtype=torch.int32, device=self.query.device)

    @property
    def lens(self) -> Tensor:
        """(S,) int32."""
        return torch.tensor(self.seq_lens, dtype=torch.int32, device=self.query.device)

    @property
    def cache_bytes(self) -> int:
        """What attention must read of the cache at least."""
        pool = self.cache.key
        return 2 * sum(self.seq_lens) * pool.shape[1] * pool.shape[3] * pool.element_size()


def make_batch(
    query_lens: list[int],
    seq_lens: list[int],
    device: torch.device,
    sizes: Sizes,
    *,
    dtype: torch.dtype = BFLOAT16,
    cache_dtype: torch.dtype | None = None,
    spare_blocks: int = 0,
) -> Batch:
    """Sequences whose blocks are in random order, and behind `spare_blocks` others."""
    counts = [-(-length // sizes.block_size) for length in seq_lens]
    order = (torch.randperm(sum(counts)) + spare_blocks).int().split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True, padding_value=-1)
    kind = cache_dtype or dtype
    shape = (spare_blocks + sum(counts), sizes.kv_heads, sizes.block_size, sizes.dim)
    pools = [torch.empty(shape, dtype=kind, device=device) for _ in range(2)]
    for pool in pools:
        for first in range(spare_blocks, len(pool), 4096):
            part = pool[first : first + 4096]
            part.copy_(torch.randn(part.shape, device=device))
    scale = torch.ones(1, device=device) if kind in FLOAT8 else None
    query = torch.randn(sum(query_lens), sizes.query_heads, sizes.dim, device=device).to(dtype)
    cache = PagedCache(pools[0], pools[1], scale, scale)
    return Batch(query, cache, tables.to(device), query_lens, seq_lens)


def decode(batch: Batch, **how: Any) -> Callable[[], Tensor]:
    """One launch for a batch of one query token each; all that a step prepares is done before."""
    window = how.pop("window", 0)
    plan = plan_decodes(np.array(batch.seq_lens), batch.query.device, window)
    return lambda: attend_decodes(
        batch.query, batch.cache, batch.block_tables, plan, scale=batch.scale, **how
    )


def prefill(batch: Batch, **how: Any) -> Callable[[], Tensor]:
    """One launch for any batch."""
    operands = (batch.query, batch.cache, batch.block_tables, batch.starts, batch.lens)
    return lambda: attend_ragged(*operands, scale=batch.scale, **how)
