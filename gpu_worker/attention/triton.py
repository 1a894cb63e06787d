"""Paged attention on a GPU by the Triton kernels: reads the blocks where they are.

Owns the cache, K and V apart, each (num_blocks, HK, block_size, D) a layer. The sequences at the
front of a step that have one query token each, which the decode batch is, go to the decode kernel;
all others to the prefill kernel. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.attention.base import (
    AttentionMetadata,
    IntArray,
    KVShape,
    LayerAttention,
    StaticDecodes,
)
from gpu_worker.native.library import NoLibraryError
from gpu_worker.transfer import to_device
from kernels.decode_attention import attend_decodes
from kernels.decode_plan import DecodePlan, plan_decodes, repeatable_plan
from kernels.head_norms import HeadNorms
from kernels.paged_cache import PagedCache, float8_of
from kernels.prefill_attention import attend_ragged
from kernels.reshape_and_cache import reshape_and_cache
from kernels.rotary_and_cache import rotary_and_cache


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers of a step share, on the device."""

    num_decodes: int
    decode_lens: IntArray  # (num_decodes,) on the host; none if the plans are there already
    seq_lens: Tensor  # (S,) int32
    query_start_loc: Tensor  # (S + 1,) int32; empty if all are decodes
    block_tables: Tensor  # (S, B) int32
    slot_mapping: Tensor  # (T,) int64


class TritonAttention:
    """The fast backend of a GPU worker. See `AttentionBackend` for what its methods promise."""

    def __init__(
        self, block_size: int, dtype: torch.dtype, device: torch.device, *, is_float8: bool = False
    ) -> None:
        """Attend with numbers of `dtype`; with `is_float8` the cache holds them in a byte each."""
        self._block_size = block_size
        self._query_dtype = dtype
        self._dtype = float8_of(device) if is_float8 else dtype
        self._device = device
        # What is stored is the number itself: without data to calibrate by, any scale is a guess.
        self._scale = torch.ones(1, device=device) if is_float8 else None
        self._caches: list[PagedCache] = []
        self._step: _Step | None = None
        self._plans: dict[int, DecodePlan] = {}  # of this step, by window

    def prepare(self, shapes: Sequence[KVShape]) -> None:
        """Raise NoLibraryError unless the kernels know layers of these shapes, and can be compiled.

        Triton wants a C compiler on the machine, which only a first launch shows.
        """
        caches = [self._cache(shape, num_blocks=1) for shape in dict.fromkeys(shapes)]
        self._try_a_kernel(caches[0])

    def _try_a_kernel(self, cache: PagedCache) -> None:
        slots = torch.zeros(1, dtype=torch.int64, device=self._device)
        key, value = (
            torch.zeros(1, *pool.shape[1::2], dtype=self._query_dtype, device=self._device)
            for pool in (cache.key, cache.value)
        )
        try:
            reshape_and_cache(key, value, cache, slots)
        except Exception as error:  # the compiler's, the driver's, the assembler's
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise NoLibraryError(f"no kernel can be compiled here: {reason[0]}") from error

    def alloc_kv(self, shapes: Sequence[KVShape], num_blocks: int) -> None:
        """Make the cache. Memory that was never written may hold anything."""
        self._caches.clear()  # before the new one is made: both may not fit
        self._caches += (self._cache(shape, num_blocks) for shape in shapes)

    def cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """The blocks of a layer: K (num_blocks, HK, block_size, DK) and V (…, DV)."""
        return self._caches[layer].key, self._caches[layer].value

    def begin_step(self, metadata: AttentionMetadata) -> None:
        """Bring to the device what all layers share."""
        starts, lens = metadata.query_start_loc, metadata.seq_lens
        not_one = np.flatnonzero(np.diff(starts) != 1)
        num_decodes = int(not_one[0]) if len(not_one) else len(lens)
        both = to_device(np.concatenate((lens, starts)).astype(np.int32), self._device)
        self._plans.clear()
        self._step = _Step(
            num_decodes,
            lens[:num_decodes],
            both[: len(lens)],
            both[len(lens) :],
            metadata.block_tables.int(),
            metadata.slot_mapping,
        )

    def begin_static_step(self, decodes: StaticDecodes) -> None:
        """Let all layers read the tensors given, now and whenever a graph repeats them."""
        num_seqs = len(decodes.seq_lens)
        self._step = _Step(
            num_seqs,
            np.zeros(0, dtype=np.int64),
            decodes.seq_lens,
            decodes.seq_lens[:0],
            decodes.block_tables,
            decodes.slot_mapping,
        )
        self._plans = {
            window: repeatable_plan(decodes.seq_lens, starts, window, max_items=decodes.max_items)
            for window, starts in decodes.work_starts.items()
        }

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store key (HK, T, DK) and value (HK, T, DV) by the slot mapping."""
        assert self._step is not None, "begin_step comes first"
        reshape_and_cache(
            _by_token(key), _by_token(value), self._caches[layer], self._step.slot_mapping
        )

    def rotate_and_write(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        positions: Tensor,
        cos_sin: Tensor,
        norms: HeadNorms | None,
    ) -> None:
        """Rotate query (T, HQ, DK) where it is, and key (T, HK, DK) on its way to the cache.

        Value (T, HK, DV) is stored as it is. See `rotary_and_cache` for the rest.
        """
        assert self._step is not None, "begin_step comes first"
        slots, cache = self._step.slot_mapping, self._caches[layer]
        rotary_and_cache(
            query, key, value, cache, positions, slots, cos_sin, norms=norms, out=query
        )

    def attend(self, layer: int, query: Tensor, how: LayerAttention) -> Tensor:
        """Attend with query (HQ, T, DK); returns (T, HQ, DV)."""
        assert self._step is not None, "begin_step comes first"
        step, cache, window = self._step, self._caches[layer], how.sliding_window or 0
        by_token = _by_token(query)
        out = by_token.new_empty(*by_token.shape[:2], cache.value_dim)
        if decodes := step.num_decodes:
            attend_decodes(
                by_token[:decodes],
                cache,
                step.block_tables[:decodes],
                self._plan(step, window),
                scale=how.scale,
                softcap=how.softcap or 0.0,
                sinks=how.sinks,
                out=out[:decodes],
            )
        if decodes == len(step.seq_lens):
            return out
        attend_ragged(
            by_token,
            cache,
            step.block_tables,
            step.query_start_loc,
            step.seq_lens,
            scale=how.scale,
            window=window,
            softcap=how.softcap or 0.0,
            sinks=how.sinks,
            first_seq=decodes,
            out=out,
        )
        return out

    def _plan(self, step: _Step, window: int) -> DecodePlan:
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = plan_decodes(step.decode_lens, self._device, window)
        return plan

    def _cache(self, shape: KVShape, num_blocks: int) -> PagedCache:
        key, value = (
            torch.empty(
                (num_blocks, shape.num_kv_heads, self._block_size, dim),
                dtype=self._dtype,
                device=self._device,
            )
            for dim in (shape.key_dim, shape.value_dim)
        )
        try:
            return PagedCache(key, value, self._scale, self._scale)
        except ValueError as error:
            raise NoLibraryError(str(error)) from None


def _by_token(heads: Tensor) -> Tensor:
    """(H, T, D) as (T, H, D): a view, if the numbers of a token and head lie together."""
    return (heads if heads.stride(2) == 1 else heads.contiguous()).transpose(0, 1)
