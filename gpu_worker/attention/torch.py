"""Paged attention in plain torch: works on every device and for every model that can be served.

Owns the cache as two tensors a layer, K and V, each (num_blocks + 1, HK, block_size, D): the last
block is the *null block*, zeros that are never written. To attend, blocks are copied into
contiguous memory as `attention.plan` says, and given to `attention.dense`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker.attention.base import AttentionMetadata, KVShape, LayerAttention
from gpu_worker.attention.dense import attend_causal, attend_single
from gpu_worker.attention.plan import Plan, Planner

GATHER_BYTES = 16 * 1024 * 1024  # of one layer's keys, or values, that a group may bring together


@dataclass(frozen=True, slots=True)
class _Rows:
    """Blocks that are brought together, and what of the copy is zeroed."""

    blocks: Tensor  # (N * HK * B,) int64: rows of a pool as (blocks * HK, block_size * D)
    stale: Tensor | None  # int64: rows of the copy as (N * HK * L, D)


class TorchAttention:
    """The backend that always works. See `AttentionBackend` for what its methods promise."""

    def __init__(self, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        self._shapes: list[KVShape] = []
        self._caches: list[tuple[Tensor, Tensor]] = []
        self._buffers: dict[str, Tensor] = {}
        self._planner: Planner | None = None
        self._metadata: AttentionMetadata | None = None
        self._plans: dict[int | None, Plan] = {}  # of this step, by window
        self._rows: dict[tuple[int | None, int, int], _Rows] = {}  # of this step, by use
        self._slot_rows: dict[int, Tensor] = {}  # of this step, by number of key heads

    def alloc_kv(self, shapes: Sequence[KVShape], num_blocks: int) -> None:
        """Make the cache. Memory that was never written may hold anything."""
        self._caches.clear()  # before the new one is made: both may not fit
        self._shapes = list(shapes)
        for shape in shapes:
            key = self._pool(num_blocks, shape.num_kv_heads, shape.key_dim)
            value = self._pool(num_blocks, shape.num_kv_heads, shape.value_dim)
            self._caches.append((key, value))
        widest = max(s.num_kv_heads * max(s.key_dim, s.value_dim) for s in shapes)
        block_bytes = widest * self._block_size * self._dtype.itemsize
        self._planner = Planner(
            self._block_size,
            num_blocks,
            max(GATHER_BYTES // block_bytes, 1),
            self._dtype,
            self._device,
        )

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """The blocks of a layer: K (num_blocks, HK, block_size, DK) and V (…, DV)."""
        key, value = self._caches[layer]
        return key[:-1], value[:-1]

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Forget what was prepared for the step before; the rest is made when a layer asks."""
        self._metadata = metadata
        self._plans.clear()
        self._rows.clear()
        self._slot_rows.clear()

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store key (HK, T, DK) and value (HK, T, DV) by the slot mapping."""
        num_kv_heads = key.shape[0]
        rows = self._slot_rows.get(num_kv_heads)
        if rows is None:
            rows = self._slot_rows[num_kv_heads] = self._rows_of_slots(num_kv_heads)
        for pool, new in zip(self._caches[layer], (key, value), strict=True):
            flat = new.transpose(0, 1).reshape(-1, new.shape[-1])  # (T * HK, D)
            pool.view(-1, new.shape[-1]).index_copy_(0, rows, flat)

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        """Attend with query (HQ, T, DK); returns (T, HQ, DV)."""
        window = how.sliding_window
        plan = self._plan(window)
        num_heads, num_tokens, _ = query.shape
        out = query.new_empty(num_tokens, num_heads, self._shapes[layer].value_dim)
        by_token = query.transpose(0, 1)  # (T, HQ, DK)
        for i, group in enumerate(plan.groups):
            key, value = self._gather(layer, (window, i), group.blocks, group.stale)
            out[group.tokens] = attend_single(by_token[group.tokens], key, value, group.mask, how)
        for i, stretch in enumerate(plan.stretches, start=len(plan.groups)):
            key, value = self._gather(layer, (window, i), stretch.blocks)
            keys, values = key[0, :, : stretch.num_keys], value[0, :, : stretch.num_keys]
            attended = attend_causal(query[:, stretch.tokens], keys, values, how)
            out[stretch.tokens] = attended.transpose(0, 1)
        return out

    def _plan(self, window: int | None) -> Plan:
        plan = self._plans.get(window)
        if plan is None:
            assert self._planner is not None, "alloc_kv comes first"
            assert self._metadata is not None, "begin_step comes first"
            plan = self._plans[window] = self._planner.plan(self._metadata, window)
        return plan

    def _pool(self, num_blocks: int, num_kv_heads: int, dim: int) -> Tensor:
        size = (num_blocks + 1, num_kv_heads, self._block_size, dim)
        pool = torch.empty(size, dtype=self._dtype, device=self._device)
        pool[-1].zero_()
        return pool

    def _rows_of_slots(self, num_kv_heads: int) -> Tensor:
        """Rows of tokens and heads, (T * HK,), in a pool seen as (blocks * HK * block_size, D)."""
        assert self._metadata is not None, "begin_step comes first"
        slots = self._metadata.slot_mapping.unsqueeze(1)  # (T, 1)
        blocks, offsets = slots // self._block_size, slots % self._block_size
        heads = torch.arange(num_kv_heads, device=self._device)
        return ((blocks * num_kv_heads + heads) * self._block_size + offsets).flatten()

    def _gather(
        self, layer: int, use: tuple[int | None, int], blocks: Tensor, stale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Bring blocks (N, B) together: keys (N, HK, L, DK) and values (N, HK, L, DV).

        They are valid until the next call. `use` names the blocks within the step.
        """
        num_kv_heads = self._shapes[layer].num_kv_heads
        rows = self._rows.get((*use, num_kv_heads))
        if rows is None:
            rows = self._rows[*use, num_kv_heads] = self._find_rows(blocks, stale, num_kv_heads)
        key, value = (
            self._copied(name, pool, rows).view(len(blocks), num_kv_heads, -1, pool.shape[-1])
            for name, pool in zip(("key", "value"), self._caches[layer], strict=True)
        )
        return key, value

    def _find_rows(self, blocks: Tensor, stale: Tensor | None, num_kv_heads: int) -> _Rows:
        heads = torch.arange(num_kv_heads, device=self._device)
        of_blocks = blocks.unsqueeze(1) * num_kv_heads + heads.unsqueeze(1)  # (N, HK, B)
        if stale is None or not len(stale):
            return _Rows(of_blocks.flatten(), None)
        num_tokens = blocks.shape[1] * self._block_size
        sequences, tokens = stale[:, :1], stale[:, 1:]  # (X, 1)
        of_stale = (sequences * num_kv_heads + heads) * num_tokens + tokens  # (X, HK)
        return _Rows(of_blocks.flatten(), of_stale.flatten())

    def _copied(self, name: str, pool: Tensor, rows: _Rows) -> Tensor:
        """Copy rows of a pool, as (blocks * HK, block_size * D), to memory that all uses share."""
        flat = pool.view(-1, self._block_size * pool.shape[-1])
        size = len(rows.blocks) * flat.shape[1]
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = flat.new_empty(size)
        out = buffer[:size].view(-1, flat.shape[1])
        torch.index_select(flat, 0, rows.blocks, out=out)
        if rows.stale is not None:
            out.view(-1, pool.shape[-1]).index_fill_(0, rows.stale, 0)
        return out
